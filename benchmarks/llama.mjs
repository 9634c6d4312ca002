// llama.cpp for benchmarks/engines.py: node llama.mjs NODE_MODULES MODEL.gguf THREADS. Every line of stdin is a list of lists of token ids, special
// tokens included; every answer is a line of JSON with their vectors and the peak memory beyond what there was before the model was loaded.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [modules, modelPath, threads] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`));

function bytes(field) {
    const found = readFileSync("/proc/self/status", "utf8").match(new RegExp(`${field}:\\s+(\\d+)`));
    return found ? Number(found[1]) * 1024 : 0;
}

const llama = await getLlama({ build: "never", gpu: false, skipDownload: true, maxThreads: Number(threads), logLevel: "error" });
const before = bytes("VmRSS");
const model = await llama.loadModel({ modelPath });
const context = await model.createEmbeddingContext({ contextSize: 1024, batchSize: 1024, threads: Number(threads) });
console.log(JSON.stringify({ ready: true }));

for await (const line of createInterface({ input: process.stdin })) {
    const vectors = [];
    for (const ids of JSON.parse(line)) {
        vectors.push((await context.getEmbeddingFor(ids)).vector);
    }
    console.log(JSON.stringify({ vectors, bytes: bytes("VmHWM") - before }));
}
process.exit(0);
