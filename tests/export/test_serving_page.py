"""Pins docs/serving.md: its commands are understood, the files that it names are those that are
written, and its head for vLLM is the model's."""

import importlib
import re
import shlex
from pathlib import Path

import torch
from safetensors.torch import save_file

from neobert import NeoBERTForSequenceClassification
from neobert.export.options import OPTIONS

from .conftest import build


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_its_commands_are_understood():
    lines = re.findall(r"^neobert export .*$", PAGE, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        _, arguments = OPTIONS["export"].read(shlex.split(line, comments=True)[2:])
        assert arguments.folder in ("FOLDER", "examples/sentence-encoder")


def test_its_file_names():
    for name in ("onnx", "openvino"):
        for precision, written in importlib.import_module(
            f"neobert.export.{name}"
        ).PRECISIONS.items():
            assert re.search(
                rf"^\| `{precision}` \| `{name}/{re.escape(written.file)}`", PAGE, re.MULTILINE
            ), f"{name} {precision}"


def test_the_head_outside_of_the_engine(tmp_path, monkeypatch):
    """The lines for vLLM, run as they stand on the first token's vectors, give the model's
    logits."""
    model = build(NeoBERTForSequenceClassification, num_labels=3)
    (tmp_path / "FOLDER").mkdir()
    save_file(model.state_dict(), tmp_path / "FOLDER" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "np.tanh" in block
    )
    names = {}
    exec(code, names)
    ids = torch.randint(5, 60, (4, 9))
    with torch.no_grad():
        vectors, expected = model.model(ids).last_hidden_state[:, 0], model(ids).logits
    assert torch.allclose(torch.from_numpy(names["logits"](vectors.numpy())), expected, atol=1e-5)
