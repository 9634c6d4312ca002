"""Test docs/serving.md.

Its commands are valid, the files it names are written, its vLLM configuration is that of the model,
and its table marks only tested engines as tested.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.export_models import build
from helpers.vectors import mean_vectors
from safetensors.torch import save_file
from transformers import AutoTokenizer

from neobert import NeoBERTForSequenceClassification
from neobert.export import command
from neobert.export.options import OPTIONS


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples" / "sentence-encoder"
ENGINES = ROOT / ".cache" / "engines"
# (mark before it, language, text) of every block.
BLOCKS = re.findall(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TABLE = re.search(r"\| Engine \| Input \|.*?\n\n", PAGE, re.DOTALL)[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLE.strip().splitlines()[2:]
]
TEXTS = ["a text", "A bird of prey with a hooked beak."]


def test_its_commands_are_understood():
    lines = re.findall(r"^neobert export .*$", PAGE, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        _, arguments = OPTIONS["export"].read(shlex.split(line, comments=True)[2:])
        assert arguments.model.folder in ("FOLDER", "examples/sentence-encoder")


def test_its_file_names():
    for name in ("onnx", "openvino"):
        module = importlib.import_module(f"neobert.export.{name}")
        for precision, written in module.PRECISIONS.items():
            row = rf"^\| `{precision}` \| `{name}/{re.escape(written.file)}`"
            assert re.search(row, PAGE, re.MULTILINE), f"{name} {precision}"


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


# ------------------------------------------------------------------------------------------------
# the table and the blocks name tests that exist


def missing(name):
    """Why a name of a test is none: "make TARGET", "FILE" or "FILE::FUNCTION"; None if it is."""
    if name.startswith("make "):
        target = re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if target else f"the Makefile has no {name[5:]}"
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return f"there is no {path}"
    source = (ROOT / path).read_text(encoding="utf-8")
    exists = not function or re.search(rf"^def {function}\(", source, re.MULTILINE)
    return None if exists else f"{path} has no {function}"


def test_every_engine_names_its_test():
    """An engine that is tested names tests that exist, and one that is not supported a reason."""
    assert len(ROWS) > 15 and all(len(row) == 5 for row in ROWS)
    for engine, _, _, tested, _ in ROWS:
        status = tested.partition(":")[0]
        tests = re.findall(r"`((?:make [\w-]+)|(?:tests/[\w/.:]+))`", tested)
        if status in ("yes", "inputs only", "loader only"):
            assert tests, f"{engine} names no test"
        else:
            assert status in ("no", "not supported"), f"{engine}: {tested}"
            assert not tests, f"{engine} is tested"
            assert status == "no" or len(tested) > 40, f"{engine}: no reason"
        for name in tests:
            assert missing(name) is None, f"{engine}: {missing(name)}"


def test_every_block_is_run_or_marked_as_read():
    assert len(BLOCKS) > 15
    for mark, _, text in BLOCKS:
        first = text.splitlines()[0]
        assert mark, f"nothing says how this block is checked: {first}"
        if mark.startswith("run: "):
            assert missing(mark[5:]) is None, f"{first}: {missing(mark[5:])}"
        else:
            assert mark in ("read", "output"), f"{first}: {mark}"
        if mark == "read":
            before = PAGE[: PAGE.index(text)].rsplit("\n## ", 1)[-1]
            assert re.search("not tested", before, re.IGNORECASE)


# ------------------------------------------------------------------------------------------------
# the lines, run as they stand


def block(mark):
    """The text of the block with a mark."""
    (block,) = (text for owner, _, text in BLOCKS if owner.endswith(f"::{mark}"))
    return block


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with OUTPUT, of two engines, and model.gguf, of the bundled encoder."""
    for name in ("onnx", "onnxruntime", "onnxscript", "openvino", "gguf"):
        pytest.importorskip(name, reason=f"needs {name}")
    place = tmp_path_factory.mktemp("page")
    output = str(place / "OUTPUT")
    command.main(["onnx", str(FOLDER), output, "--precisions", "fp32", "int8"])
    command.main(["openvino", str(FOLDER), str(place / "other")])
    shutil.move(place / "other" / "openvino", output)
    command.main(["gguf", str(FOLDER), str(place / "model.gguf"), "--dtype", "f16"])
    return place


@pytest.fixture(scope="module")
def inputs():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    batch = tokenizer(TEXTS, padding=True, return_tensors="np")
    return {
        "ids": batch["input_ids"].astype(np.int64),
        "mask": batch["attention_mask"].astype(np.int64),
    }


@pytest.fixture(scope="module")
def expected():
    return mean_vectors(FOLDER, TEXTS)


def check(vectors, expected, least):
    vectors = np.array(vectors)
    assert vectors.shape == expected.shape
    assert ((vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1)).min() > least


@pytest.mark.slow
def test_the_lines_for_onnx_runtime(outputs, inputs, expected, monkeypatch):
    check_lines("test_the_lines_for_onnx_runtime", outputs, inputs, expected, monkeypatch)


@pytest.mark.slow
def test_the_lines_for_openvino(outputs, inputs, expected, monkeypatch):
    check_lines("test_the_lines_for_openvino", outputs, inputs, expected, monkeypatch)


def check_lines(name, outputs, inputs, expected, monkeypatch):
    monkeypatch.chdir(outputs)
    names = dict(inputs)
    exec(block(name), names)
    check(names["vectors"], expected, 1 - 1e-5)


def in_node(outputs, code):
    """The last line that a module says, JSON, run beside OUTPUT and the packages."""
    if shutil.which("node") is None or not (ENGINES / "node" / ".ready").exists():
        pytest.skip("the packages of npm are not installed: make test-serving")
    packages = outputs / "node_modules"
    if not packages.exists():
        packages.symlink_to(ENGINES / "node" / "node_modules")
    (outputs / "lines.mjs").write_text(code)
    run = subprocess.run(
        ["node", "lines.mjs"], cwd=outputs, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_the_lines_for_transformers_js(outputs, expected):
    lines = block("test_the_lines_for_transformers_js")
    assert '["a text", "another one"]' in lines
    code = lines.replace('["a text", "another one"]', json.dumps(TEXTS))
    vectors = in_node(outputs, code + "console.log(JSON.stringify(vectors.tolist()));\n")
    check(vectors, expected, 0.99)  # q8


@pytest.mark.slow
def test_the_lines_for_llama_cpp(outputs, expected):
    code = block("test_the_lines_for_llama_cpp")
    code += "console.log(JSON.stringify([Array.from(vector)]));\nprocess.exit(0);\n"
    check(in_node(outputs, code), expected[:1], 0.9999)


@pytest.mark.slow
def test_the_lines_for_the_onnx_backend(outputs, expected):
    """Both models of the block, in the environment of `make test-engines`."""
    if not (ENGINES / "st" / ".ready").exists():
        pytest.skip("Optimum is not installed: make test-engines")
    code = block("test_the_lines_for_the_onnx_backend")
    assert code.count("model = SentenceTransformer(") == 2
    report = f"\nimport json\nprint(json.dumps(model.encode({TEXTS!r}).tolist()))\n"
    start, second = code.rsplit("model = ", 1)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [ENGINES / "st" / "bin" / "python", "-c", f"{start}{report}model = {second}{report}"],
        cwd=outputs,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    full, quantized = (json.loads(line) for line in run.stdout.splitlines() if line[:2] == "[[")
    check(full, expected, 1 - 1e-5)
    check(quantized, expected, 0.99)
