// Logits of a sequence classifier in llama.cpp: node classifier.mjs NODE_MODULES MODEL.gguf LABELS. stdin is one line, a list of texts; the answer is
// one line with a list of LABELS numbers for each. node-llama-cpp itself gives the sigmoid of the first number alone, so its inner context is asked.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [modules, modelPath, labels] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`));
const llama = await getLlama({ build: "never", gpu: false, skipDownload: true, maxThreads: 1, logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const context = await model.createRankingContext({ contextSize: 1024, batchSize: 1024, threads: 1 });
const { bos, eos } = model.tokens;

const logits = [];
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
    const ids = [bos, ...model.tokenize(text, false), eos];
    await context._evaluateRankingForInput(ids);
    logits.push(Array.from(context._llamaContext._ctx.getEmbedding(ids.length, Number(labels))));
}
process.stdout.write(`${JSON.stringify({ logits })}\n`, () => process.exit(0));
