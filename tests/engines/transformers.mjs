// transformers.js in node: node transformers.mjs NODE_MODULES FOLDER DTYPE. stdin is one line, a list of texts; the answer is one line with, for each
// text, its token vectors (in one padded batch), the engine's own mean pooling of it alone, and the CPU seconds of the second of two passes.
import { readFileSync } from "node:fs";
import { basename, dirname, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, folder, dtype] = process.argv.slice(2);
const { AutoModel, AutoTokenizer, env, pipeline } = await import(
    pathToFileURL(`${modules}/@huggingface/transformers/dist/transformers.node.mjs`)
);
env.allowRemoteModels = false;
env.localModelPath = dirname(resolve(folder));
const name = basename(resolve(folder));
const texts = JSON.parse(readFileSync(0, "utf8"));
const options = { dtype, device: "cpu", session_options: { intraOpNumThreads: 1 } };

const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, options);
const inputs = tokenizer(texts, { padding: true, truncation: true });
const { last_hidden_state: hidden } = await model(inputs);
const [rows, length, width] = hidden.dims;
const mask = inputs.attention_mask.tolist();
const tokens = [];
for (let row = 0; row < rows; row++) {
    const vectors = [];
    for (let place = 0; place < length; place++) {
        if (Number(mask[row][place])) {
            const start = (row * length + place) * width;
            vectors.push(Array.from(hidden.data.slice(start, start + width)));
        }
    }
    tokens.push(vectors);
}

const extract = await pipeline("feature-extraction", name, options);
const pooled = [];
let seconds = 0;
for (let pass = 0; pass < 2; pass++) {
    const start = process.cpuUsage();
    pooled.length = 0;
    for (const text of texts) {
        pooled.push(Array.from((await extract(text, { pooling: "mean" })).data));
    }
    const { user, system } = process.cpuUsage(start);
    seconds = (user + system) / 1e6;
}
process.stdout.write(`${JSON.stringify({ tokens, pooled, seconds, version: env.version })}\n`, () => process.exit(0));
