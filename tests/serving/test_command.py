"""Test `neobert serve` as a process: start, shutdown, several workers and refused options."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from helpers.serving import ENCODER, server_process, texts_of_all_lengths
from uvicorn.config import STARTUP_FAILURE

from neobert.cli import main
from neobert.common.errors import UserError
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.serving.app import create_app
from neobert.serving.command import (
    Supervisor,
    WorkerApplication,
    _bind,
    _listen,
    describe,
    server_config,
)
from neobert.serving.options import OPTIONS


def request(address, path, body=None, headers=None):
    """Send a GET request, or a POST request with a JSON body, and return the response as text."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    message = urllib.request.Request(address + path, data, headers)
    with urllib.request.urlopen(message, timeout=900) as response:
        return response.read().decode()


@pytest.mark.slow
def test_sigterm_completes_requests_in_progress():
    """After SIGTERM, the server completes the requests in progress and ends with exit code 0."""
    texts = texts_of_all_lengths(400)
    encoder = PackedEncoder(str(ENCODER), "float32", "cpu")
    with server_process() as (process, address), ThreadPoolExecutor(4) as pool:
        assert json.loads(request(address, "/health")) == {"status": "ok"}
        parts = [
            pool.submit(request, address, "/embed", {"inputs": texts[start : start + 100]})
            for start in range(0, 400, 100)
        ]

        # Send the signal when all four requests are in the queue.
        deadline = time.monotonic() + 300
        while 'neobert_queue_requests{model="encoder"} 4.0' not in request(address, "/metrics"):
            assert time.monotonic() < deadline, "The queue never contained all four requests."
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)

        rows = [row for part in parts for row in json.loads(part.result())]
        assert process.wait(300) == 0
        assert process.stderr.read() == "", "The server must write one line only."
        with pytest.raises(urllib.error.URLError):
            request(address, "/health")

    expected = encoder.encode(texts)
    assert np.array(rows, np.float32).tobytes() == expected.tobytes()


def test_startup_message(reranker, classifier):
    """Check the message that the server logs at its start."""
    arguments = ["--model", str(ENCODER), "--reranker", reranker, "--classifier", classifier]
    options = OPTIONS["serve"].read([*arguments, "--dtype", "int8", "--device", "cpu"])
    app = create_app(options)
    assert describe(app, options, "http://127.0.0.1:8000") == (
        "Serving model sentence-encoder, int8 on cpu, 384 dimensions, up to 256 tokens per text, "
        "reranker reranker, classifier topics at http://127.0.0.1:8000"
    )

    app.state.serving.encoder.max_length = None
    assert "384 dimensions, reranker reranker" in describe(app, options, "http://127.0.0.1:8000")


@pytest.mark.slow
def test_workers_share_metrics_and_are_restarted():
    """Two workers count in the same metrics, and a worker that dies is restarted."""
    with server_process("--workers", "2") as (process, address):

        def embed(_):
            return request(address, "/embed", {"inputs": "an eagle"})

        def count():
            text = request(address, "/metrics")
            return float(re.search(r"^neobert_tokens_total\S+ (\S+)$", text, re.M)[1])

        with ThreadPoolExecutor(8) as pool:
            responses = set(pool.map(embed, range(40)))
        assert len(responses) == 1 and count() == 40 * 4

        # The server keeps the counters of a worker that dies, and continues to respond.
        workers = workers_of(process)
        workers[1].kill()
        assert len(json.loads(request(address, "/embed", {"inputs": "an eagle"}))) == 1
        deadline = time.monotonic() + 900
        while len(new_workers := workers_of(process)) < 2 or workers[1] in new_workers:
            assert time.monotonic() < deadline, "The worker was not restarted within 900 seconds."
            time.sleep(0.1)
        assert workers[0] in new_workers and count() == 41 * 4

        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def workers_of(process):
    """Return the worker processes of a server."""
    workers = []
    for child in psutil.Process(process.pid).children():
        # A killed worker is a zombie process, which has no command line, until the server notices.
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


@pytest.mark.slow
def test_ctrl_c_ends_workers_that_are_starting():
    """Ctrl-C ends the server within seconds and without a traceback while its workers start."""
    command = [sys.executable, "-m", "neobert", "serve", "--workers", "2", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--model", str(ENCODER)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 900
    while len(workers_of(process)) < 2:
        assert time.monotonic() < deadline, "The workers were not started within 900 seconds."
        time.sleep(0.1)
    # The supervisor now waits for the workers, which import their modules.
    time.sleep(1)

    # A terminal sends the signal to all processes of the command.
    os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.communicate(timeout=300)[1] == ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0


def test_supervisor_handles_signals_while_workers_start():
    """The supervisor ends at a signal without waiting for the answers of its workers."""
    supervisor = object.__new__(Supervisor)
    supervisor.config = SimpleNamespace(timeout_worker_healthcheck=60)
    supervisor.should_exit = threading.Event()
    supervisor.signal_queue = []

    def ping(timeout):
        assert timeout < 1 and not supervisor.should_exit.is_set()
        supervisor.signal_queue.append(signal.SIGTERM)
        return False

    worker = SimpleNamespace(process=SimpleNamespace(is_alive=lambda: True), ping=ping)
    supervisor.processes = [worker, worker]
    supervisor.keep_subprocess_alive()
    assert supervisor.should_exit.is_set()


@pytest.mark.slow
def test_worker_startup_failure_stops_the_server(tmp_path):
    """An error of a worker at its start ends the server, with a message and no traceback."""
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "neobert", "serve", "--workers", "2", "--port", "0"]
    process = subprocess.run(
        [*command, "--model", str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 2
    assert "cannot be loaded" in process.stderr and "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError("out of memory\nat line 3"),
            "unexpected RuntimeError: out of memory at line 3. Set NEOBERT_DEBUG=1 to see the "
            "traceback.",
        ),
        (UserError("the model cannot be loaded."), "the model cannot be loaded."),
    ],
    ids=["RuntimeError", "UserError"],
)
def test_every_exception_of_a_worker_at_its_start_is_reported(error, sentence, monkeypatch, capsys):
    """Any exception at the start of a worker ends in one sentence and the code of a failed start.

    The supervisor restarts a worker that ends with an exception, and stops after this code.
    """

    def fail(application):
        raise error

    monkeypatch.delenv("NEOBERT_DEBUG", raising=False)
    monkeypatch.setattr(WorkerApplication, "_create_app", fail)
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--workers", "2"])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        WorkerApplication(options, "http://127.0.0.1:8000", listener=None, announcer=None)()

    assert caught.value.code == STARTUP_FAILURE
    assert capsys.readouterr().err == f"neobert serve: {sentence}\n"
    assert signal.getsignal(signal.SIGTERM) is handler, "The handler of SIGTERM must be restored."


def test_address_in_use_is_reported_before_loading_models(capsys):
    """The server reports an address in use at once, with the option that selects another port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        start = time.monotonic()
        assert main(["serve", "--model", str(ENCODER), "--port", port]) == 2
        assert time.monotonic() - start < 20
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port} must be available" in error and "Choose another --port" in error


def test_an_address_is_bound_before_the_server_listens():
    """A second server cannot bind the address of a server that loads its models."""
    with _bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} must be available"):
            _bind("127.0.0.1", port)
        _listen(listener, "http://127.0.0.1")


def test_closed_connections_do_not_occupy_the_address():
    """A server can be restarted at once: the port of its closed connections can be used."""
    with _bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        _listen(listener, "http://127.0.0.1")
        with socket.create_connection(address) as client:
            connection, _ = listener.accept()
            # The side that closes the connection first keeps its port for a minute.
            connection.close()
            assert client.recv(1) == b""

    with _bind(*address) as listener:
        _listen(listener, "http://127.0.0.1")
        socket.create_connection(address).close()


def test_another_server_on_the_address_ends_the_worker(monkeypatch, capsys):
    """A worker whose address is in use ends with the code after which the supervisor stops."""
    monkeypatch.setattr("neobert.serving.app.create_app", lambda options: None)
    monkeypatch.setattr("neobert.serving.command.describe", lambda *arguments: "")
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--workers", "2", "--threads", "1"])
    with socket.socket() as other, _bind("127.0.0.1", 0) as listener:
        # Both sockets must have the option to be bound to the same address.
        for bound in (other, listener):
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        with pytest.raises(SystemExit) as caught:
            WorkerApplication(options, "http://127.0.0.1", listener, announcer=None)()
    assert caught.value.code == STARTUP_FAILURE
    assert "the address http://127.0.0.1 must be available" in capsys.readouterr().err


def test_headers_are_limited_with_httptools():
    """The server uses h11 if httptools is installed, too, which stores headers of any size."""
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--timeout", "5"])
    with _bind("127.0.0.1", 0) as listener:
        application = WorkerApplication(options, "http://127.0.0.1", listener, announcer=None)
        config = server_config(options, application)
    assert config.http == "h11" and config.timeout_graceful_shutdown == 6


def test_a_missing_model_is_refused(capsys, tmp_path):
    """A path of an encoder or a reranker that does not exist is an error."""
    missing = str(tmp_path / "missing")
    for arguments in (["--model", missing], ["--model", str(ENCODER), "--reranker", missing]):
        assert main(["serve", *arguments]) == 2
        assert "there is no" in capsys.readouterr().err


def test_tcp_nodelay_is_set():
    """Accepted connections have the socket option TCP_NODELAY.

    asyncio sets the option only if the protocol of the listening socket is TCP. Without the option,
    a response could be delayed by 40 ms.
    """

    async def accept():
        accepted = asyncio.get_running_loop().create_future()

        def connected(reader, writer):
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _bind("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(connected, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                no_delay = await accepted
                writer.close()
        return no_delay

    assert asyncio.run(accept())


def test_warning_for_remote_access_without_api_key(capsys, caplog, monkeypatch):
    """A server without an API key that accepts remote connections logs a warning."""
    # The address is reserved for documentation and cannot be bound, so the server never starts.
    arguments = ["serve", "--model", str(ENCODER), "--host", "192.0.2.1"]
    monkeypatch.setenv("NEOBERT_API_KEY", "")
    assert main(arguments) == 2
    assert "NEOBERT_API_KEY must not be empty" in capsys.readouterr().err

    # A server with an API key logs no warning.
    monkeypatch.setenv("NEOBERT_API_KEY", "secret")
    assert main(arguments) == 2
    assert "192.0.2.1:8000 must be available" in capsys.readouterr().err and not caplog.messages

    monkeypatch.delenv("NEOBERT_API_KEY")
    assert main(arguments) == 2
    assert "The server is open to other machines." in caplog.text
