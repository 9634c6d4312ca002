"""Test docs/export.md, and the engines of docs/serving.md.

Their commands are valid, their file names are those of the exports, the code for classifiers in
vLLM returns the logits, the examples run, and the table marks only tested engines as tested.
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
from helpers.vectors import mean_embeddings
from safetensors.torch import save_file

from neobert import NeoBERTForSequenceClassification
from neobert.export import command
from neobert.export.options import OPTIONS


ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join(
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("serving", "export")
)
FOLDER = ROOT / "examples" / "sentence-encoder"
ENGINES = ROOT / ".cache" / "engines"
# (marker in the comment above, language, text) of every code block.
BLOCKS = re.findall(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TABLE = re.search(r"\| Engine \| Input \|.*?\n\n", PAGE, re.DOTALL)[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLE.strip().splitlines()[2:]
]
TEXTS = ["a text", "A bird of prey with a hooked beak."]


def test_export_commands_are_valid():
    """The option parser accepts every `neobert export` command of the page."""
    lines = re.findall(r"^neobert export .*$", PAGE, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        _, arguments = OPTIONS["export"].read(shlex.split(line, comments=True)[2:])
        assert arguments.model.folder in ("FOLDER", "examples/sentence-encoder")


def test_file_names_in_precision_tables():
    """The tables of precisions name the files that the exports write."""
    for name in ("onnx", "openvino"):
        module = importlib.import_module(f"neobert.export.{name}")
        for precision, spec in module.PRECISIONS.items():
            row = rf"^\| `{precision}` \| `{name}/{re.escape(spec.file)}`"
            assert re.search(row, PAGE, re.MULTILINE), f"no row for {precision} of {name}"


def test_vllm_classifier_example(tmp_path, monkeypatch):
    """The code for classifiers in vLLM computes the logits of the model.

    vLLM returns the hidden states of the first token. The code of the page runs unchanged.
    """
    model = build(NeoBERTForSequenceClassification, num_labels=3)
    (tmp_path / "FOLDER").mkdir()
    save_file(model.state_dict(), tmp_path / "FOLDER" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "np.tanh" in block
    )
    namespace = {}
    exec(code, namespace)

    ids = torch.randint(5, 60, (4, 9))
    with torch.no_grad():
        first_tokens = model.model(ids).last_hidden_state[:, 0]
        expected = model(ids).logits
    assert torch.allclose(
        torch.from_numpy(namespace["logits"](first_tokens.numpy())), expected, atol=1e-5
    )


# ------------------------------------------------------------------------------------------------
# Tests that the table and the code blocks name


def missing(name):
    """Return the reason why a test does not exist, or None if it does.

    Args:
        name: "make TARGET", "FILE" or "FILE::FUNCTION".
    """
    if name.startswith("make "):
        target = re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if target else f"the Makefile has no target {name[5:]}"

    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return f"there is no {path}"
    source = (ROOT / path).read_text(encoding="utf-8")
    exists = not function or re.search(rf"^def {function}\(", source, re.MULTILINE)
    return None if exists else f"{path} has no {function}"


def test_engine_rows_refer_to_existing_tests():
    """The row of a tested engine names existing tests, and that of an unsupported one a reason."""
    assert len(ROWS) > 15 and all(len(row) == 5 for row in ROWS)
    for engine, _, _, tested, _ in ROWS:
        status = tested.partition(":")[0]
        tests = re.findall(r"`((?:make [\w-]+)|(?:tests/[\w/.:]+))`", tested)
        if status in ("yes", "inputs only", "loader only"):
            assert tests, f"the row of {engine} does not name a test"
        else:
            assert status in ("no", "not supported"), (
                f"the row of {engine} has an unknown status: {tested}"
            )
            assert not tests, f"the row of {engine} names a test, but is not marked as tested"
            assert status == "no" or len(tested) > 40, f"the row of {engine} gives no reason"
        for name in tests:
            assert missing(name) is None, f"the row of {engine}: {missing(name)}"


def test_code_blocks_have_valid_markers():
    """The marker above each code block names its test, or states that the block is not run.

    Blocks that were only read must be in a section that states "not tested".
    """
    assert len(BLOCKS) > 15
    for marker, _, text in BLOCKS:
        first_line = text.splitlines()[0]
        assert marker, f"the block has no marker: {first_line}"
        if marker.startswith("run: "):
            assert missing(marker[5:]) is None, f"{first_line}: {missing(marker[5:])}"
        else:
            assert marker in ("read", "output"), f"{first_line}: unknown marker {marker}"
        if marker == "read":
            section = PAGE[: PAGE.index(text)].rsplit("\n## ", 1)[-1]
            assert re.search("not tested", section, re.IGNORECASE)


# ------------------------------------------------------------------------------------------------
# Examples


def block(test):
    """Return the text of the code block whose marker names a test function."""
    (block,) = (text for marker, _, text in BLOCKS if marker.endswith(f"::{test}"))
    return block


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return a directory with exports of the bundled encoder.

    OUTPUT contains the ONNX and OpenVINO files, and model.gguf is beside it.
    """
    for name in ("onnx", "onnxruntime", "onnxscript", "openvino", "gguf"):
        pytest.importorskip(name, reason=f"needs {name}")

    folder = tmp_path_factory.mktemp("page")
    output = str(folder / "OUTPUT")
    command.main(["onnx", str(FOLDER), output, "--precisions", "fp32", "int8"])
    command.main(["openvino", str(FOLDER), str(folder / "other")])
    shutil.move(folder / "other" / "openvino", output)
    command.main(["gguf", str(FOLDER), str(folder / "model.gguf"), "--dtype", "f16"])
    return folder


@pytest.fixture(scope="module")
def expected():
    """Return the embeddings of the texts in torch."""
    return mean_embeddings(FOLDER, TEXTS)


def check(embeddings, expected, min_cosine):
    """Check the cosines between embeddings and those of torch, which have length 1."""
    embeddings = np.array(embeddings)
    assert embeddings.shape == expected.shape
    assert ((embeddings * expected).sum(1) / np.linalg.norm(embeddings, axis=1)).min() > min_cosine


@pytest.mark.slow
def test_onnx_runtime_example(outputs, expected, monkeypatch):
    """The example returns the embeddings of torch, for the texts of this test."""
    monkeypatch.chdir(outputs)
    check(run_onnx_example()["embeddings"], expected, 1 - 1e-5)


@pytest.mark.slow
def test_openvino_example(outputs, expected, monkeypatch):
    """The example returns the embeddings of torch for the inputs of the ONNX example."""
    monkeypatch.chdir(outputs)
    namespace = run_onnx_example()
    exec(block("test_openvino_example"), namespace)
    check(namespace["embeddings"], expected, 1 - 1e-5)


def run_onnx_example():
    """Run the example of ONNX Runtime with `TEXTS`, and return its variables."""
    namespace = {}
    exec(with_texts(block("test_onnx_runtime_example")), namespace)
    return namespace


def with_texts(example):
    """Return an example with `TEXTS` instead of its texts."""
    assert '["a text", "another one"]' in example
    return example.replace('["a text", "another one"]', json.dumps(TEXTS))


def in_node(outputs, code):
    """Run a JavaScript module beside OUTPUT, and return the JSON in its last line of output."""
    if shutil.which("node") is None or not (ENGINES / "node" / ".ready").exists():
        pytest.skip("needs the npm packages that `make test-serving` installs")

    packages = outputs / "node_modules"
    if not packages.exists():
        packages.symlink_to(ENGINES / "node" / "node_modules")
    (outputs / "lines.mjs").write_text(code)

    process = subprocess.run(
        ["node", "lines.mjs"], cwd=outputs, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_transformers_js_example(outputs, expected):
    """The example returns the embeddings of torch, for the texts of this test."""
    code = with_texts(block("test_transformers_js_example"))
    code += "console.log(JSON.stringify(embeddings.tolist()));\n"
    # The example loads the int8 graph.
    check(in_node(outputs, code), expected, 0.99)


@pytest.mark.slow
def test_llama_cpp_example(outputs, expected):
    """The example returns the embedding of torch for its text."""
    code = block("test_llama_cpp_example")
    code += "console.log(JSON.stringify([Array.from(vector)]));\nprocess.exit(0);\n"
    check(in_node(outputs, code), expected[:1], 0.9999)


@pytest.mark.slow
def test_sentence_transformers_onnx_example(outputs, expected):
    """The example loads a float32 and an int8 graph, and both return the embeddings of torch.

    It runs in the environment of `make test-engines`. The test adds a call of `encode` after each
    model.
    """
    if not (ENGINES / "st" / ".ready").exists():
        pytest.skip("needs Optimum, which `make test-engines` installs")

    code = block("test_sentence_transformers_onnx_example")
    assert code.count("model = SentenceTransformer(") == 2
    encode = f"\nimport json\nprint(json.dumps(model.encode({TEXTS!r}).tolist()))\n"
    first, second = code.rsplit("model = ", 1)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [ENGINES / "st" / "bin" / "python", "-c", f"{first}{encode}model = {second}{encode}"],
        cwd=outputs,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-2000:]

    full, quantized = (json.loads(line) for line in process.stdout.splitlines() if line[:2] == "[[")
    check(full, expected, 1 - 1e-5)
    check(quantized, expected, 0.99)
