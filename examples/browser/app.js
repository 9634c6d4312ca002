// Semantic search over sentences.txt: the model in model/ turns each sentence, and what is typed, into a vector of length 1; hits are the sentences
// whose vectors have the largest cosine with the query's.
import { AutoModel, AutoTokenizer, env } from "./vendor/transformers.web.min.js";

const HITS = 8;
const BATCH = 16;
const EXAMPLES = ["my internet does not work", "animals with a good memory", "how to save money", "something about outer space"];
const [status, progress, form, query, examples, hits] = ["status", "progress", "form", "query", "examples", "hits"].map((id) => document.getElementById(id));

// Everything comes from this page's own server.
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.useBrowserCache = false;
env.localModelPath = new URL("./", import.meta.url).pathname; // a path: with an address the library looks for no tokenizer
env.useWasmCache = false;
env.backends.onnx.wasm.wasmPaths = { wasm: new URL("./vendor/ort-wasm-simd-threaded.wasm", import.meta.url).href };
env.backends.onnx.wasm.numThreads = 1;

function show(message, share) {
    status.textContent = message;
    progress.hidden = share === undefined;
    progress.value = share ?? 1;
}

async function load() {
    const texts = (await (await fetch("sentences.txt")).text()).split("\n").filter(Boolean);
    const tokenizer = await AutoTokenizer.from_pretrained("model");
    const model = await AutoModel.from_pretrained("model", {
        dtype: "q8",
        device: "wasm",
        progress_callback: ({ status, progress = 0 }) => status === "progress" && show("Loading the model…", progress / 200),
    });

    // Vectors of length 1; the exported graph pools by itself.
    async function encode(texts) {
        const { sentence_embedding } = await model(tokenizer(texts, { padding: true, truncation: true }));
        return sentence_embedding.normalize().tolist();
    }

    const vectors = [];
    for (let first = 0; first < texts.length; first += BATCH) {
        show(`Reading ${texts.length} sentences…`, 0.5 + first / texts.length / 2);
        vectors.push(...(await encode(texts.slice(first, first + BATCH))));
        await new Promise(requestAnimationFrame);
    }
    return { texts, vectors, encode };
}

function item({ text, cosine }) {
    const row = document.createElement("li");
    const score = document.createElement("div");
    const [bar, number] = [document.createElement("span"), document.createElement("span")];
    row.append(text, score);
    score.className = "score";
    score.append(bar, number);
    bar.style.setProperty("--share", `${Math.round(100 * Math.max(cosine, 0))}%`);
    number.textContent = cosine.toFixed(2);
    return row;
}

async function search({ texts, vectors, encode }) {
    const asked = query.value.trim();
    if (!asked) {
        hits.replaceChildren();
        return;
    }
    const start = performance.now();
    const [vector] = await encode([asked]);
    if (asked !== query.value.trim()) {
        return; // more was typed meanwhile
    }
    const found = vectors.map((other, i) => ({ text: texts[i], cosine: other.reduce((sum, x, j) => sum + x * vector[j], 0) }));
    found.sort((a, b) => b.cosine - a.cosine);
    hits.replaceChildren(...found.slice(0, HITS).map(item));
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
