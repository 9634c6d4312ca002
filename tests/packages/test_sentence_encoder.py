"""Test the wheel `neobert-sentence-encoder`: its files, and its functions `encode` and `load`."""

import importlib
import json
import os
import subprocess
import sys
import venv
import zipfile

import numpy as np
import pytest
from helpers.paths import ROOT


PACKAGE = ROOT / "packages" / "sentence-encoder"
ENCODER = ROOT / "examples" / "sentence-encoder"
MODEL_FILES = {
    "1_Pooling/config.json",
    "2_Normalize/config.json",
    "attention_neobert.py",
    "config.json",
    "config_sentence_transformers.json",
    "configuration_neobert.py",
    "model.safetensors",
    "model_int8.onnx",
    "modeling_neobert.py",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
# Program for an environment without torch: reads texts from its first argument, and writes the
# embeddings of `encode` to the second.
ENCODE = """
import json, sys
import numpy as np
from neobert_sentence_encoder import encode

texts = json.load(open(sys.argv[1]))
embeddings = encode(texts, batch_size=16)
alone = np.stack([encode(text) for text in texts[:8]])
assert np.abs(alone - embeddings[:8]).max() < 1e-5, "a batch changes the embedding of a text"
assert encode([]).shape == (0, 384)
means = encode(texts, normalize=False)
lengths = np.linalg.norm(means, axis=1, keepdims=True)
assert np.abs(lengths - 1).min() > 0.01
assert np.abs(means / lengths - embeddings).max() < 1e-5
assert not {"torch", "transformers"} & set(sys.modules)
try:
    encode([None])
except TypeError as error:
    assert "must contain strings, got NoneType" in str(error)
else:
    raise AssertionError("None is not a text")
np.save(sys.argv[2], embeddings)
"""
# Program for an environment with torch: writes the embeddings of the model that `load` returns. The
# third argument is the directory of the package.
LOAD = """
import json, sys
import numpy as np

sys.path.insert(0, sys.argv[3])
from neobert_sentence_encoder import load

np.save(sys.argv[2], load().encode(json.load(open(sys.argv[1])), show_progress_bar=False))
"""
DEPENDENCIES = ["numpy", "onnxruntime>=1.17", "tokenizers"]
# These variables make downloads fail.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}


def run(python, code, *arguments):
    """Run a program without a network, in the directory of its output."""
    environment = {**os.environ, **OFFLINE}
    command = [str(python), "-c", code, *map(str, arguments)]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=arguments[1].parent
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return the Python of an environment with the requirements of `encode` only.

    Tests that need it are skipped without a network.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", *DEPENDENCIES]
    result = subprocess.run(command, capture_output=True, text=True)
    # pip prints this message if it cannot reach an index.
    if "(from versions: none)" in result.stderr:
        pytest.skip("pip cannot reach a package index to install numpy, onnxruntime and tokenizers")
    assert result.returncode == 0, result.stderr[-2000:]
    return python


@pytest.fixture(scope="module")
def wheel(bare_python, tmp_path_factory):
    """Build the wheel and return its path.

    The build installs setuptools from the package index. Without a network, `bare_python` skips the
    tests before.
    """
    output = tmp_path_factory.mktemp("wheel")
    script = PACKAGE / "build_wheel.py"
    subprocess.run([sys.executable, script, "--output", output], check=True)
    (path,) = output.glob("*.whl")
    return path


def test_texts_that_cannot_be_encoded_are_refused(monkeypatch):
    """`encode` names the first text that is no string, or contains a lone surrogate.

    The texts are checked before the model is loaded, which only the wheel contains.
    """
    monkeypatch.syspath_prepend(PACKAGE)
    encode = importlib.import_module("neobert_sentence_encoder").encode
    message = "`sentences` must be valid Unicode, got a lone surrogate in text 1. Replace it with"
    with pytest.raises(ValueError, match=message) as caught:
        encode(["an eagle", "an \ud800 eagle", "\ud800"])
    assert not isinstance(caught.value, UnicodeError)
    with pytest.raises(ValueError, match="got a lone surrogate in text 0"):
        encode("\udfff")
    with pytest.raises(TypeError, match="must contain strings, got NoneType as text 1"):
        encode(["an eagle", None])


@pytest.mark.slow
def test_the_wheel_is_small_and_complete(wheel):
    """The wheel is below 30 MB and contains exactly the code, the model and the license."""
    assert wheel.stat().st_size < 30e6
    names = zipfile.ZipFile(wheel).namelist()
    package = "neobert_sentence_encoder/"
    expected = {f"{package}model/{name}" for name in MODEL_FILES}
    expected |= {f"{package}__init__.py", f"{package}py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    with zipfile.ZipFile(wheel) as file:
        for name in ("model.safetensors", "modeling_neobert.py"):
            assert file.read(f"{package}model/{name}") == (ENCODER / name).read_bytes()


@pytest.mark.slow
def test_encode_and_load_agree_offline(wheel, bare_python, tmp_path):
    """`encode` and `load` return almost the same embeddings, and download nothing.

    `encode` runs an int8 graph in an environment without torch, and `load` a float32 model in the
    environment of the tests.
    """
    lines = (ROOT / "examples" / "definitions.tsv").read_text().splitlines()
    texts = [line.split("\t")[1] for line in lines[:: len(lines) // 50]]
    texts += ["", "a", "long " * 700]
    (tmp_path / "texts.json").write_text(json.dumps(texts))

    install = [bare_python, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(install, check=True)
    run(bare_python, ENCODE, tmp_path / "texts.json", tmp_path / "int8.npy")

    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    folder = tmp_path / "unpacked"
    run(sys.executable, LOAD, tmp_path / "texts.json", tmp_path / "torch.npy", folder)

    int8 = np.load(tmp_path / "int8.npy")
    torch = np.load(tmp_path / "torch.npy")
    assert int8.shape == torch.shape == (len(texts), 384)
    np.testing.assert_allclose(np.linalg.norm(int8, axis=1), 1, atol=1e-5)
    cosines = (int8 * torch).sum(1)
    assert cosines.mean() > 0.999 and cosines.min() > 0.998


def test_module_constants_and_readme_match_the_model():
    """The constants of the module and the sizes in the README are those of the model."""
    module = (PACKAGE / "neobert_sentence_encoder" / "__init__.py").read_text()
    readme = (PACKAGE / "README.md").read_text()
    config = json.loads((ENCODER / "config.json").read_text())
    settings = json.loads((ENCODER / "sentence_bert_config.json").read_text())
    assert f"DIMENSION = {config['hidden_size']}" in module
    assert f"MAX_LENGTH = {settings['max_seq_length']}" in module
    layers = config["num_hidden_layers"]
    assert f"{layers} layers and a hidden size of {config['hidden_size']}" in readme
    assert f"first {settings['max_seq_length']} tokens" in readme
