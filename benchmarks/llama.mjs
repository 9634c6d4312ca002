// llama.cpp for benchmarks/engines.py: node llama.mjs NODE_MODULES MODEL.gguf THREADS [POOLING]. Every line of stdin is a list of texts, each a string or
// a list of token ids, special tokens included; every answer is a line of JSON with their vectors, the CPU seconds, and the peak memory beyond what there was before the
// model was loaded. POOLING, a number (1 mean, 2 the first token, 3 the last), takes the place of the file's own.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [modules, modelPath, threads, pooling] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`));

function bytes(field) {
    const found = readFileSync("/proc/self/status", "utf8").match(new RegExp(`${field}:\\s+(\\d+)`));
    return found ? Number(found[1]) * 1024 : 0;
}

const llama = await getLlama({ build: "never", gpu: false, skipDownload: true, maxThreads: Number(threads), logLevel: "error" });
const before = bytes("VmRSS");
const metadataOverrides = pooling === undefined ? undefined : { "neo-bert": { pooling_type: Number(pooling) } };
const model = await llama.loadModel({ modelPath, metadataOverrides });
const context = await model.createEmbeddingContext({ contextSize: 1024, batchSize: 1024, threads: Number(threads) });
console.log(JSON.stringify({ ready: true }));

for await (const line of createInterface({ input: process.stdin })) {
    const vectors = [];
    const start = process.cpuUsage();
    for (const text of JSON.parse(line)) {
        vectors.push((await context.getEmbeddingFor(text)).vector);
    }
    const { user, system } = process.cpuUsage(start);
    console.log(JSON.stringify({ vectors, seconds: (user + system) / 1e6, bytes: bytes("VmHWM") - before }));
}
process.exit(0);
