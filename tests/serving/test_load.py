"""Test the server under load: 600 requests of 32 concurrent clients.

Some requests are invalid, and some are canceled. No response may be lost or belong to another
request, and the memory of the server must not grow.
"""

import http.client
import json
import random
import re
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil
import pytest
from helpers.serving import ENCODER, decode, server_process, texts_of_all_lengths

from neobert.embeddings.packed_encoder import PackedEncoder


pytestmark = pytest.mark.slow
REQUESTS = 600
CLIENTS = 32
# Maximum growth of the memory in bytes.
MAX_GROWTH = 32 * 2**20
# Bodies of invalid requests, by the status of their response.
BROKEN_BODIES = {
    400: [
        b"{",
        b'{"input": []}',
        b'{"input": [1000000]}',
        json.dumps({"input": "word " * 300}).encode(),
        b'{"input": "a", "dimensions": 385}',
    ],
    404: [b'{"input": "a", "model": "other"}'],
    413: [json.dumps({"input": ["word " * 200] * 1000}).encode()],
}


def is_broken(index):
    """Return whether the request with this index is invalid."""
    return index % 20 == 7


def is_cancelled(index):
    """Return whether the client disconnects before the response to the request."""
    return index % 10 == 4


class Client:
    """Client that sends every 32nd request of a round, one after the other.

    Attributes:
        rows: Embeddings of the responses, {index of the request: [(index of the text, embedding)]}.
        statuses: Statuses of the invalid requests, {index: (status, expected status)}.
        cancelled: Number of requests that were canceled.
    """

    def __init__(self, number, address, texts):
        self.number = number
        self.host = urlsplit(address).hostname
        self.port = urlsplit(address).port
        self.texts = texts
        self.generator = random.Random(number)
        self.rows = {}
        self.statuses = {}
        self.cancelled = 0

    def run(self, indices):
        """Send the requests of this client, and store their responses.

        Args:
            indices: Indices of the requests of all clients in a round.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=900)
        for index in indices:
            if index % CLIENTS != self.number:
                continue
            if is_broken(index):
                expected = self.generator.choice(list(BROKEN_BODIES))
                body = self.generator.choice(BROKEN_BODIES[expected])
                response, _ = self.send(connection, body)
                self.statuses[index] = response.status, expected
            elif is_cancelled(index):
                self.cancel(index)
            else:
                count = 1 + self.generator.randrange(3)
                selected = [(index + 7 * i) % len(self.texts) for i in range(count)]
                encoding_format = self.generator.choice(["float", "base64"])
                body = {
                    "input": [self.texts[i] for i in selected],
                    "encoding_format": encoding_format,
                }
                response, content = self.send(connection, json.dumps(body).encode())
                assert response.status == 200, f"Request {index} failed: {content}"
                data = json.loads(content)["data"]
                for i, item in zip(selected, data, strict=True):
                    self.rows.setdefault(index, []).append((i, decode(item["embedding"])))
        connection.close()

    def send(self, connection, body):
        """Send a request, and return its response and the content of the response."""
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/embeddings", body, headers)
        response = connection.getresponse()
        return response, response.read()

    def cancel(self, index):
        """Send a large request, completely or in part, and disconnect before the response."""
        body = json.dumps({"input": self.texts[:40]}).encode()
        if self.generator.random() < 0.3:
            body = body[: len(body) // 2]
            length = 2 * len(body)
        else:
            length = len(body)
        with socket.create_connection((self.host, self.port), timeout=900) as connection:
            connection.sendall(
                b"POST /v1/embeddings HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {length}\r\n\r\n".encode()
                + body
            )
            time.sleep(0.02 * self.generator.random())
        self.cancelled += 1


def warm_up(address):
    """Run batches of all sizes, because oneDNN caches a kernel for each number of int8 rows.

    Without these requests, the cached kernels would look like a memory leak.
    """
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=900)
    for tokens in (*range(16, 512, 16), *range(512, 3073, 64)):
        texts = ["a " * 126] * (tokens // 128)
        if tokens % 128:
            texts.append("a " * (tokens % 128 - 2))
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/embed", json.dumps({"inputs": texts}), headers)
        assert connection.getresponse().read().startswith(b"[[")
    connection.close()


def metric(address, pattern):
    """Return the sum of the metrics whose names match a pattern."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=900) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(pattern, line))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_responses_and_memory_under_load(dtype):
    """Check the embeddings, statuses, counters and memory after four rounds of requests."""
    texts = texts_of_all_lengths(250)
    encoder = PackedEncoder(str(ENCODER), dtype, "cpu")
    alone = [encoder.encode([text])[0].tobytes() for text in texts]

    with server_process("--dtype", dtype) as (process, address):
        warm_up(address)
        clients = [Client(number, address, texts) for number in range(CLIENTS)]
        memory = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            for start in range(0, REQUESTS, REQUESTS // 4):
                indices = range(start, start + REQUESTS // 4)
                list(pool.map(lambda client, indices=indices: client.run(indices), clients))
                memory.append(psutil.Process(process.pid).memory_info().rss)

        # Canceled requests leave the queue when the server notices the disconnect.
        deadline = time.monotonic() + 300
        while metric(address, "neobert_queue_requests") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert metric(address, "neobert_queue_(requests|tokens)") == 0

        route = 'neobert_requests_total{route="/v1/embeddings",status='
        counts = {
            status: metric(address, re.escape(f'{route}"{status}"'))
            for status in (200, 400, 404, 413, 429, 499, 500, 503)
        }

    rows = {index: row for client in clients for index, row in client.rows.items()}
    statuses = {index: item for client in clients for index, item in client.statuses.items()}
    cancelled = sum(client.cancelled for client in clients)

    # Every request has a response or was canceled.
    assert len(rows) + len(statuses) + cancelled == REQUESTS
    for index, items in rows.items():
        for i, row in items:
            assert row.tobytes() == alone[i], (
                f"Request {index} received a wrong embedding of text {i}."
            )
    for index, (status, expected) in statuses.items():
        assert status == expected, f"Request {index} received an unexpected status."

    # A client can disconnect after the response was computed.
    assert counts[200] + counts[499] == len(rows) + cancelled and counts[499] > cancelled / 2
    assert counts[400] + counts[404] + counts[413] == len(statuses)
    assert counts[429] == counts[500] == counts[503] == 0

    # The first round has allocated the buffers, so later rounds must not increase the memory.
    mebibytes = [size >> 20 for size in memory]
    print(f"{dtype}: memory {mebibytes} MiB, statuses {counts}")
    growth = memory[-1] - memory[0]
    assert growth < MAX_GROWTH, f"The memory grew by more than the limit: {mebibytes} MiB."
