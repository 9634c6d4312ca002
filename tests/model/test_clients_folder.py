"""Test the bundled encoder in other libraries with the code blocks of the documentation.

Each block of docs/compatibility.md, and the fastembed block of docs/export.md, runs in a process
without this package, in the environment that `make test-clients` creates.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.vectors import mean_embeddings

from neobert.encoding import command as encode
from neobert.export import command


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".cache" / "engines" / "clients"
PYTHON = CLIENTS / "bin" / "python"
FOLDER = ROOT / "examples" / "sentence-encoder"
TEXTS = [
    "rain",
    "A bird of prey with a hooked beak.",
    "The committee met again on Tuesday, and nothing was decided.",
    "Dr. Alvarez's results (see Table 3) were confirmed by two laboratories in São Paulo. " * 3,
]
SECTION = re.search(
    r"## The bundled encoder in other libraries\n(.*?)\n## ",
    (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8"),
    re.DOTALL,
)[1]
BLOCKS = dict(re.findall(r"^([A-Z]?[A-Za-z]+)[^\n]*:\n```python\n(.*?)```", SECTION, re.M | re.S))
FASTEMBED = next(
    block
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(encoding="utf-8"), re.S
    )
    if "fastembed" in block
)


@pytest.fixture(autouse=True)
def _installed():
    """Skip the test if the libraries are not installed."""
    if not (CLIENTS / ".ready").exists():
        pytest.skip("The libraries are not installed. Run `make test-clients`.")


@pytest.fixture(scope="module")
def expected():
    """Return the reference embeddings of `TEXTS`."""
    return mean_embeddings(FOLDER, TEXTS)


def run(*arguments, cwd=ROOT, stdin=None, code=0):
    """Run Python in the environment of the libraries, without this package on its path.

    Args:
        *arguments: Arguments of the interpreter.
        cwd: Working directory.
        stdin: Standard input.
        code: Expected exit status.

    Returns:
        The standard output, or the standard error if an error is expected.
    """
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False"}

    process = subprocess.run(
        [PYTHON, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == code, process.stderr[-3000:]
    return process.stdout if code == 0 else process.stderr


def vectors_of(block, cwd=ROOT):
    """Return the variable `vectors` of a code block that runs with `texts` set to `TEXTS`."""
    start = f"import json, sys\ntexts = json.loads({json.dumps(json.dumps(TEXTS))})\n"
    end = "\nprint('@' + json.dumps([[float(x) for x in v] for v in vectors]))\n"
    stdout = run("-c", start + block + end, cwd=cwd)
    return np.array(json.loads(stdout[stdout.index("@") + 1 :].splitlines()[0]))


def check(vectors, expected):
    """Check that embeddings have the expected shape and directions."""
    cosines = (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1)
    assert vectors.shape == expected.shape and cosines.min() > 1 - 1e-5, (
        f"The embeddings have shape {vectors.shape} and the cosines {cosines}."
    )


def test_page_covers_all_libraries():
    """The page has a code block for each library, in this order."""
    libraries = "LangChain LlamaIndex Haystack txtai BERTopic Chroma LanceDB Chonkie".split()
    assert list(BLOCKS) == [*libraries, "Qdrant", "DSPy", "scikit", "DuckDB"]


@pytest.mark.parametrize("library", list(BLOCKS)[:-1])
def test_code_blocks_give_the_reference_embeddings(library, expected):
    """The code block of each library gives the reference embeddings."""
    check(vectors_of(BLOCKS[library]), expected)


def test_duckdb(tmp_path, expected):
    """DuckDB reads the embeddings from the parquet files of `neobert encode`."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(rows)
    paths = str(tmp_path / "texts.jsonl"), str(tmp_path / "vectors")
    encode.main([*paths, "--model", str(FOLDER), "--dtype", "float32"])
    check(vectors_of(BLOCKS["DuckDB"], cwd=tmp_path), expected)


def test_fastembed(tmp_path, expected):
    """fastembed gives the reference embeddings with an ONNX export and the code of the page."""
    command.main(["onnx", str(FOLDER), str(tmp_path / "OUTPUT")])
    assert '["a text"]' in FASTEMBED
    check(vectors_of(FASTEMBED.replace('["a text"]', "texts"), cwd=tmp_path), expected)


def test_versions_match_constraints_and_page():
    """The installed versions are those of the constraints, and the page states the same ones."""
    lines = (ROOT / "constraints" / "clients.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    code = "import importlib.metadata as m, sys\nprint(*(m.version(n) for n in sys.argv[1:]))"
    installed = dict(zip(pinned, run("-c", code, *pinned).split()))
    assert {name: version.partition("+")[0] for name, version in installed.items()} == pinned

    prose = re.sub(r"```.*?```", "", SECTION.partition("what does not work")[0], flags=re.S)
    for version in re.findall(r"\d+\.\d+\.\d+", prose):
        assert version in pinned.values(), f"{version} is not in constraints/clients.txt."
