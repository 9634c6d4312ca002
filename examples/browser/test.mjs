// Opens the page in headless Chromium as a phone of 390 x 844, types queries and reads the first hits: node test.mjs NODE_MODULES SITE [SCREENSHOT.png].
// Chromium is the one of this machine, or that of npm's @sparticuz/chromium.
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { delimiter, extname, join, normalize } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, site, screenshot] = process.argv.slice(2);
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".json": "application/json", ".wasm": "application/wasm" };
// What is typed, and a word of the sentence that must come first.
const QUERIES = [
    ["my internet does not work", "router"],
    ["birds that remember people", "Crows"],
    ["we felt a tremor", "ground shook"],
];

const module = (path) => import(pathToFileURL(join(modules, path)));

async function browserOf() {
    const { chromium } = (await module("playwright-core/index.mjs"));
    const names = ["chromium", "chromium-browser", "google-chrome"];
    const own = process.env.PATH.split(delimiter).flatMap((folder) => names.map((name) => join(folder, name))).find(existsSync);
    if (own) {
        return chromium.launch({ executablePath: own, args: ["--no-sandbox"] });
    }
    const { default: packed } = await module("@sparticuz/chromium/build/esm/index.js");
    return chromium.launch({ executablePath: await packed.executablePath(), args: packed.args });
}

const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const file = join(site, path.endsWith("/") ? `${path}index.html` : path);
    if (!existsSync(file) || !statSync(file).isFile()) {
        response.writeHead(404).end();
        return;
    }
    const type = TYPES[extname(file)] ?? "application/octet-stream";
    response.writeHead(200, { "content-type": type, "content-length": statSync(file).size });
    createReadStream(file).pipe(response);
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const origin = `http://127.0.0.1:${server.address().port}`;

const problems = [];
const browser = await browserOf().catch((error) => {
    console.log(`skipped: no browser starts here (${error.message.split("\n")[0]}): apt-get install chromium`);
    console.log("0 passed, 0 failed, 1 skipped");
    process.exit(0);
});
const context = await browser.newContext({ viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true });
const page = await context.newPage();
page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(origin) && !/^(data|blob):/.test(url)) {
        problems.push(`the page asked for ${url}`);
    }
});
page.on("pageerror", (error) => problems.push(`the page failed: ${error.message}`));

let passed = 0;
try {
    await page.goto(`${origin}/`);
    await page.waitForSelector("body[data-ready]", { timeout: 180_000 });
    for (const [text, word] of QUERIES) {
        await page.fill("#query", text);
        await page.waitForSelector(`#hits[data-query="${text}"]`, { timeout: 60_000 });
        const first = await page.textContent("#hits li:first-child");
        console.log(`${text} -> ${first}`);
        if (first.includes(word)) {
            passed += 1;
        } else {
            problems.push(`the first hit of "${text}" has no "${word}": ${first}`);
        }
    }
    const wider = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    if (wider > 0) {
        problems.push(`the page is ${wider} pixels wider than the phone`);
    }
    if (screenshot) {
        await page.screenshot({ path: screenshot });
    }
} catch (error) {
    problems.push(`${error.message}; the page says: ${await page.textContent("#status").catch(() => "nothing")}`);
}
await browser.close();
server.close();
problems.forEach((problem) => console.error(problem));
console.log(`${passed} passed, ${problems.length} failed`);
process.exit(problems.length ? 1 : 0);
