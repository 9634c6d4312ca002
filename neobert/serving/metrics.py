"""Prometheus metrics of the server, also across several worker processes."""

import contextlib
import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from .options import METRICS_FOLDER_VARIABLE


# Upper bounds of the buckets of histograms.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)


class Metrics:
    """Metrics of one worker process."""

    def __init__(self) -> None:
        # The global registry of prometheus_client would not allow two servers in one process.
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "neobert_requests", "HTTP requests.", ["route", "status"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "neobert_request_seconds",
            "Latency of HTTP requests in seconds.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "neobert_tokens", "Tokens that the models processed.", ["model"], registry=self.registry
        )

        # The mode livesum adds up the gauges of those workers that are alive.
        self.queue_tokens = Gauge(
            "neobert_queue_tokens",
            "Tokens in the queue, with those of the running batch.",
            ["model"],
            multiprocess_mode="livesum",
            registry=self.registry,
        )
        self.queue_requests = Gauge(
            "neobert_queue_requests",
            "Requests in the queue, with those of the running batch.",
            ["model"],
            multiprocess_mode="livesum",
            registry=self.registry,
        )

        self.batch_texts = Histogram(
            "neobert_batch_texts",
            "Texts per batch.",
            ["model"],
            buckets=_TEXTS,
            registry=self.registry,
        )
        self.batch_tokens = Histogram(
            "neobert_batch_tokens",
            "Tokens per batch.",
            ["model"],
            buckets=_TOKENS,
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            "neobert_batch_seconds",
            "Time of the model per batch in seconds.",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return the metrics of all workers in the text format of Prometheus."""
        folder = os.environ.get(METRICS_FOLDER_VARIABLE)
        if folder is None:
            return generate_latest(self.registry)

        # A worker that was killed cannot withdraw its gauges.
        for path in Path(folder).glob("gauge_live*_*.db"):
            pid = int(path.stem.rpartition("_")[2])
            if not _is_running(pid):
                # Another worker may remove the same files.
                with contextlib.suppress(FileNotFoundError):
                    mark_process_dead(pid, folder)

        # This registry reads the files of all workers, not the values of this process.
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)
        return generate_latest(registry)


def _is_running(pid: int) -> bool:
    try:
        # Signal 0 only checks whether the process exists.
        os.kill(pid, 0)
    except OSError:
        return False
    return True
