// Semantic search over sentences.txt. The model in model/ computes an embedding of length 1 for each sentence and for the query. The hits are the
// sentences whose embeddings have the highest cosine similarity to that of the query.
import { AutoModel, AutoTokenizer, env } from "./vendor/transformers.web.min.js";

const HITS = 8;
const BATCH = 16;
const EXAMPLES = ["my internet does not work", "animals with a good memory", "how to save money", "something about outer space"];
const [status, progress, form, query, examples, hits] = ["status", "progress", "form", "query", "examples", "hits"].map((id) => document.getElementById(id));

// All files are loaded from the server of this page.
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.useBrowserCache = false;
// The library finds the tokenizer only if this is a path and not a complete URL.
env.localModelPath = new URL("./", import.meta.url).pathname;
env.useWasmCache = false;
env.backends.onnx.wasm.wasmPaths = { wasm: new URL("./vendor/ort-wasm-simd-threaded.wasm", import.meta.url).href };
env.backends.onnx.wasm.numThreads = 1;

function show(message, fraction) {
    status.textContent = message;
    progress.hidden = fraction === undefined;
    progress.value = fraction ?? 1;
}

async function load() {
    const texts = (await (await fetch("sentences.txt")).text()).split("\n").filter(Boolean);
    const tokenizer = await AutoTokenizer.from_pretrained("model");
    const model = await AutoModel.from_pretrained("model", {
        dtype: "q8",
        device: "wasm",
        progress_callback: ({ status, progress = 0 }) => status === "progress" && show("Loading the model…", progress / 200),
    });

    // The exported graph contains the pooling.
    async function encode(texts) {
        const { sentence_embedding } = await model(tokenizer(texts, { padding: true, truncation: true }));
        return sentence_embedding.normalize().tolist();
    }

    const embeddings = [];
    for (let first = 0; first < texts.length; first += BATCH) {
        show(`Reading ${texts.length} sentences…`, 0.5 + first / texts.length / 2);
        embeddings.push(...(await encode(texts.slice(first, first + BATCH))));
        await new Promise(requestAnimationFrame);
    }
    return { texts, embeddings, encode };
}

function item({ text, cosine }) {
    const row = document.createElement("li");
    const score = document.createElement("div");
    const [bar, number] = [document.createElement("span"), document.createElement("span")];
    row.append(text, score);
    score.className = "score";
    score.append(bar, number);
    bar.style.setProperty("--fraction", `${Math.round(100 * Math.max(cosine, 0))}%`);
    number.textContent = cosine.toFixed(2);
    return row;
}

async function search({ texts, embeddings, encode }) {
    const asked = query.value.trim();
    if (!asked) {
        hits.replaceChildren();
        return;
    }
    const start = performance.now();
    const [embedding] = await encode([asked]);
    if (asked !== query.value.trim()) {
        return; // The query has changed in the meantime.
    }
    const results = embeddings.map((other, i) => ({ text: texts[i], cosine: other.reduce((sum, x, j) => sum + x * embedding[j], 0) }));
    results.sort((a, b) => b.cosine - a.cosine);
    hits.replaceChildren(...results.slice(0, HITS).map(item));
    hits.dataset.query = asked;
    show(`${texts.length} sentences, searched in ${Math.round(performance.now() - start)} ms`);
}

try {
    const index = await load();
    let waiting;
    query.addEventListener("input", () => {
        clearTimeout(waiting);
        waiting = setTimeout(search, 80, index);
    });
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        query.blur(); // a phone's keyboard makes room for the hits
        search(index);
    });
    for (const text of EXAMPLES) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = text;
        button.addEventListener("click", () => {
            query.value = text;
            search(index);
        });
        examples.append(button);
    }
    query.disabled = false;
    show(`${index.texts.length} sentences, ready`);
    document.body.dataset.ready = "true";
} catch (error) {
    show(`The model could not be loaded: ${error.message}`);
    throw error;
}
