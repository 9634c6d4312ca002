"""Pins the upload: the real client of the Hub against a local server gets just the folder; without
a token or network nothing is written; a failed upload keeps the folder; no token is printed.
"""

import http.server
import json
import threading

import pytest
from conversion_helpers import convert

from neobert.common.errors import UserError
from neobert.conversion import command


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers the calls that an upload of small files makes; remembers what was sent."""

    def do_GET(self):
        self._answer({"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})

    def do_POST(self):
        chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "")
        body = (
            self._chunks()
            if chunked
            else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        )
        self.server.calls.append((self.path, body, self.headers.get("Authorization")))
        base = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            self._answer({"url": f"{base}/me/tiny", "name": "me/tiny", "id": "me/tiny"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(
                {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": "regular",
                            "shouldIgnore": False,
                            "oid": None,
                        }
                        for f in files
                    ]
                }
            )
        elif "/commit/" in self.path:
            self._answer(
                {"commitUrl": f"{base}/me/tiny/commit/abc", "commitOid": "abc", "success": True}
            )
        else:
            self._answer({})

    def _chunks(self):
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_push_to_a_stand_in_of_the_hub(tmp_path, checkpoint, monkeypatch, capsys, without_proof):
    """The real huggingface_hub client against a local server."""
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.calls = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in (
        ("ENDPOINT", address),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_DISABLE_TELEMETRY", True),
    ):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    options = ("--tokenizer", "none", "--push-to-hub", "me/tiny", "--private", "--revision", "v2")
    convert(checkpoint, tmp_path / "out", *options)
    server.shutdown()
    assert "commit/abc" in capsys.readouterr().out
    assert 'from_pretrained("me/tiny"' in (tmp_path / "out" / "README.md").read_text()
    calls = {path: body for path, body, _ in server.calls}
    created = json.loads(calls["/api/repos/create"])
    assert created["name"] == "tiny" and (
        created.get("private") is True or created.get("visibility") == "private"
    ), created
    assert "/api/models/me/tiny/branch/v2" in calls, "the branch was not created"
    commit = next(
        body for path, body in calls.items() if path.startswith("/api/models/me/tiny/commit/v2")
    )
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    assert {
        "config.json",
        "model.safetensors",
        "modeling_neobert.py",
        "attention_neobert.py",
        "configuration_neobert.py",
        "README.md",
    } <= sent
    assert (
        json.loads(commit.splitlines()[0])["value"]["summary"] == "Convert the training checkpoint"
    )
    assert all(token == "Bearer hf_test" for _, _, token in server.calls)


def test_push_without_token_or_network(tmp_path, checkpoint, monkeypatch, without_proof):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="needs a token: run 'hf auth login', or set HF_TOKEN"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_test")
    with pytest.raises(UserError, match="the Hub cannot be reached or refuses the token"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")
    with pytest.raises(UserError, match="takes USER/NAME, but 'a/b/c' was given"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "a/b/c")
    assert [path.name for path in tmp_path.iterdir()] == ["run"], (
        "something was written before the Hub was checked"
    )


def test_failed_upload_keeps_the_folder(tmp_path, checkpoint, monkeypatch, without_proof):
    import huggingface_hub

    monkeypatch.setattr(command, "check_push", lambda repo: None)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "create_repo",
        lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("gone")),
    )
    with pytest.raises(
        UserError,
        match=r"is written, but uploading it to me/tiny failed \(gone\); later: hf upload me/tiny",
    ):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--push-to-hub", "me/tiny")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_no_token_is_printed(tmp_path, checkpoint, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("401 for https://me:hunter2@host with hf_AbCdEfGhIjKlMnOpQrStUvWx")

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_AbCdEfGhIjKlMnOpQrStUvWx")
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", refuse)
    with pytest.raises(UserError) as refusal:
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")
    assert (
        "401 for" in str(refusal.value)
        and "hunter2" not in str(refusal.value)
        and "hf_" not in str(refusal.value)
    )
