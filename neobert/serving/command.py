"""Command `neobert serve`: an HTTP server for a sentence encoder, a reranker and a classifier.

Each worker process has its own models and queue. All of them accept connections from one socket.
"""

import ipaddress
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from ..common.commands import guarded, setup_logging
from ..common.errors import UserError
from ..common.loading import check_model
from .options import API_KEY_VARIABLE, METRICS_FOLDER_VARIABLE, OPTIONS, ServeOptions


logger = logging.getLogger("neobert.serving")

# Windows has no signal masks.
CAN_BLOCK_SIGNALS = hasattr(signal, "pthread_sigmask")


class WorkerApplication:
    """Factory of the application of a worker process.

    Args:
        options: Options of the server.
        address: Address of the server.
        listener: Socket that is bound to the address.
        announcer: Semaphore that one worker acquires to log the start of the server.
    """

    def __init__(
        self, options: ServeOptions, address: str, listener: socket.socket, announcer: Any
    ) -> None:
        self.options = options
        self.address = address
        self.listener = listener
        self.announcer = announcer
        self._description = ""

    def __call__(self) -> FastAPI:
        """Load the models, and return the application."""
        if self.options.server.workers == 1:
            return self._create_app()

        setup_logging()
        # uvicorn defers SIGTERM until the application has been created, which can take a minute.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        apps: list[FastAPI] = []
        try:
            # The supervisor would restart a worker that ends with an exception.
            if guarded("neobert serve", lambda: apps.append(self._create_app())):
                sys.exit(STARTUP_FAILURE)
            return apps[0]
        finally:
            signal.signal(signal.SIGTERM, handler)
            # A second interrupt ends the worker without waiting for the requests in progress.
            if CAN_BLOCK_SIGNALS:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _create_app(self) -> FastAPI:
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        server = self.options.server
        threads = server.threads
        # Workers share the cores of the machine.
        if threads is None and server.workers > 1:
            threads = max(1, _available_cores() // server.workers)
        if threads is not None:
            torch.set_num_threads(threads)

        from .app import create_app

        app = create_app(self.options)
        self._description = describe(app, self.options, self.address)
        # An error of uvicorn would have a traceback, and the supervisor would restart the worker.
        _listen(self.listener, self.address)
        return app

    async def announce(self) -> None:
        """Log the start of the server, once, when it accepts connections."""
        if self.announcer.acquire(False):
            logger.info(self._description)


class Supervisor(Multiprocess):
    """Supervisor that also ends at once while its workers start.

    Ctrl-C sends SIGINT to all processes. A worker would end with a traceback while it imports its
    modules, so workers start with SIGINT blocked and the supervisor ends them.
    """

    def run(self) -> None:
        """Run the workers until a signal."""
        if not CAN_BLOCK_SIGNALS:
            return super().run()
        # Workers inherit the signals that are blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            super().run()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def handle_signals(self) -> None:
        """Handle the signals that have arrived, including those that are blocked."""
        if CAN_BLOCK_SIGNALS and signal.SIGINT in signal.sigpending():
            self.should_exit.set()
        super().handle_signals()

    def keep_subprocess_alive(self) -> None:
        """Restart workers that have died or do not answer."""
        # The check of uvicorn waits for the answer of a worker that still imports its modules or
        # has died, and handles no signals meanwhile.
        deadline = time.monotonic() + self.config.timeout_worker_healthcheck
        for process in self.processes:
            while process.process.is_alive() and not process.ping(timeout=0.2):
                self.handle_signals()
                if self.should_exit.is_set():
                    return
                if time.monotonic() > deadline:
                    process.kill()
        super().keep_subprocess_alive()


def describe(app: FastAPI, options: ServeOptions, address: str) -> str:
    """Return the log message about a server that has started."""
    state = app.state.serving
    encoder = state.encoder
    parts = [
        f"model {encoder.name}",
        f"{state.dtype} on {state.device}",
        f"{encoder.dimensions} dimensions",
    ]

    # T5 and similar models have no limit.
    if encoder.max_length is not None:
        parts.append(f"up to {encoder.max_length} tokens per text")
    if options.models.reranker is not None:
        parts.append(f"reranker {state.reranker.name}")
    if options.models.classifier is not None:
        parts.append(f"classifier {state.classifier.name}")
    if options.server.workers > 1:
        parts.append(f"{options.server.workers} workers")
    return f"Serving {', '.join(parts)} at {address}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert serve` until SIGTERM or an interrupt, and return the exit code."""
    options = OPTIONS["serve"].read(argv or [])
    for model in (options.models.model, options.models.reranker, options.models.classifier):
        if model is not None:
            check_model(model)
    if options.server.key is None and not _is_local(options.server.host):
        logger.warning(
            "The server is open to other machines. Set %s to require an API key.", API_KEY_VARIABLE
        )

    # The port is taken before the models are loaded.
    listener = _bind(options.server.host, options.server.port)
    port = listener.getsockname()[1]
    # A URL contains an IPv6 address in brackets.
    host = f"[{options.server.host}]" if ":" in options.server.host else options.server.host

    announcer: Any = threading.Semaphore(1)
    if options.server.workers > 1:
        # This semaphore starts a process that keeps track of it.
        announcer = multiprocessing.get_context("spawn").Semaphore(1)
    application = WorkerApplication(options, f"http://{host}:{port}", listener, announcer)

    config = server_config(options, application)
    with listener:
        if options.server.workers == 1:
            return _run_worker(config, listener)
        return _run_supervisor(config, listener)


def server_config(options: ServeOptions, application: WorkerApplication) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        application,
        factory=True,
        # httptools, which uvicorn prefers if it is installed, does not limit the size of headers.
        http="h11",
        workers=options.server.workers,
        log_config=None,
        log_level="warning",
        access_log=False,
        # Requests in progress reach their own deadline first.
        timeout_graceful_shutdown=int(options.requests.timeout) + 1,
        callback_notify=application.announce,
        # Loading a large model can keep a worker from answering the supervisor.
        timeout_worker_healthcheck=60,
    )


def _run_worker(config: uvicorn.Config, listener: socket.socket) -> int:
    """Serve in this process. A signal ends the server after the requests in progress."""
    config.load()
    server = uvicorn.Server(config)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn handles these signals, and sends them again to the handlers from before its start.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    server.run(sockets=[listener])
    return 0


def _run_supervisor(config: uvicorn.Config, listener: socket.socket) -> int:
    """Serve in worker processes, and restart those that die."""
    folder = tempfile.mkdtemp(prefix="neobert-metrics-")
    # Worker processes inherit the variable, and share their metrics in the directory.
    os.environ[METRICS_FOLDER_VARIABLE] = folder
    try:
        supervisor = Supervisor(config, sockets=[listener])
        supervisor.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    failed = any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes)
    return 2 if failed else 0


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Raises:
        UserError: If the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small responses at once (TCP_NODELAY) only for sockets with this protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _address_in_use(f"{host}:{port}", error) from error
    # With this option, another server could bind the port until this one listens.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)

    # The workers accept connections from this socket.
    listener.set_inheritable(True)
    return listener


def _listen(listener: socket.socket, address: str) -> None:
    """Listen on a socket of `_bind`, on which other workers may listen, too.

    Raises:
        UserError: If another server listens on the address.
    """
    # Without this option, closed connections of an earlier server would occupy the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen()
    except OSError as error:
        raise _address_in_use(address, error) from error


def _address_in_use(address: str, error: OSError) -> UserError:
    return UserError(
        f"the address {address} must be available, got: {error.strerror or error}. Choose another "
        "--port or --host."
    )


def _available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
