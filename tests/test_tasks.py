"""Test the table of tasks of the README.

Every command of every row runs as written on small data. The processes can import the libraries
that the README installs and no others. Commands that need the Hub run until their download fails.
"""

import configparser
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from packaging.requirements import Requirement

from benchmarks.server import free_port, server

from .test_readme import README, ROOT, table


pytestmark = pytest.mark.slow
ROWS = {task: cell for task, _, cell in table("Tasks")}
# For each row: options that make its commands fast (one list per command), and the text that its
# last command prints or the file that it writes.
SMALL = {
    "classify the rows of a CSV file": ([["--max-steps=2"]], "accuracy"),
    "find names in text": ([["--max-steps=2"]], "entity F1"),
    "predict with the classifier from the first row": ([[]], "40 rows"),
    "embed a corpus": ([[]], "embeddings.parquet"),
    "search in a corpus": ([[], []], "found in"),
    "train an encoder on pairs of texts": ([["--max-steps=2"]], "runs/encoder/modules.json"),
    "evaluate retrieval on pairs": ([[]], "MRR"),
    "distill a smaller encoder, without labels": (
        [["--max-steps=2"]],
        "runs/student/modules.json",
    ),
    "adapt to a domain or language": (
        [
            "--max-steps=3 --global-batch-tokens=512 --micro-batch-tokens=512".split()
            + "--max-length=64 --bf16=false --eval-steps=2 --save-steps=1".split()
            + ["--dataloader-num-workers=0"],
        ],
        "runs/adapted/model.safetensors",
    ),
    "train a tokenizer": ([[]], "runs/tokenizer/tokenizer.json"),
    "serve over HTTP, with the APIs of OpenAI, Cohere and Text Embeddings Inference": (
        [[]],
        "serves",
    ),
    "export to ONNX Runtime, browsers, OpenVINO": ([[]], "OUTPUT/onnx/model.onnx"),
    "convert a training checkpoint": ([[]], "OUTPUT/model.safetensors"),
    "fine-tune on GLUE or local data of the same form": (
        ["--seeds=1 --num-train-epochs=1 --max-length=16 --batch-size=8".split()],
        "runs/glue/table.md",
    ),
    "evaluate on MTEB or NanoBEIR": ([[]], "runs/mteb/table.md"),
    "measure quality by text length": (
        ["--max-texts=2 --lengths=16 --positions=4".split()],
        "runs/pseudo_perplexity/pseudo_perplexity.csv",
    ),
    "measure speed on your machine": (
        ["--layers=1 --max-batch=2 --repeats=1 --warmup=1 --threads=1".split()],
        "runs/speed/throughput.md",
    ),
}
# Rows that fail at the download of their data, and the error message.
FROM_THE_HUB = {"evaluate on MTEB or NanoBEIR": "Couldn't reach 'mteb/NanoArguAnaRetrieval'"}


def commands(cell):
    """Return the arguments of each command of a cell."""
    return [shlex.split(text) for text in re.findall(r"`((?:python|neobert).*?)`", cell)]


def installed_by(extra):
    """Return the normalized names of the distributions that `pip install '.[extra]'` installs.

    Requirements of installed distributions are followed recursively.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    todo = [Requirement(line) for line in setup["options"]["install_requires"].split()]
    todo += [Requirement(line) for line in extras[extra].split()]

    names = set()
    seen = set()
    while todo:
        requirement = todo.pop()
        name = requirement.name.lower().replace("_", "-").replace(".", "-")
        names.add(name)
        for part in {"", *requirement.extras} - {part for other, part in seen if other == name}:
            seen.add((name, part))
            if name == "neobert":
                todo += [Requirement(line) for line in extras.get(part, "").split()]
                continue
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                # The requirement is optional or for another platform.
                continue
            requirements = map(Requirement, lines)
            todo += [r for r in requirements if not r.marker or r.marker.evaluate({"extra": part})]
    return names


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return environment variables for processes that can only import what the README installs.

    A sitecustomize.py hides all modules that do not belong to the extra of the README.
    """
    extra = re.search(r"in a clone with `pip install -e '\.\[(\w+)\]'", README)[1]
    distributions = installed_by(extra)
    hidden = [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {owner.lower().replace("_", "-").replace(".", "-") for owner in owners}
        & distributions
        # setuptools contains copies of these modules.
        and module not in ("neobert", "_distutils_hack", "jaraco", "more_itertools", "backports")
    ]
    assert "lightning" not in distributions and "pytest" in hidden and "torch" not in hidden

    folder = tmp_path_factory.mktemp("only")
    code = f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n"
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def clone(bundled, tmp_path):
    """Return a folder that is like a clone in which a user has run `make demo` and added data."""
    for name in ("examples", "recipes", "tests", "convert_checkpoint.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(bundled)

    lines = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    words, texts = zip(*(line.split("\t") for line in lines[:600]))
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    (tmp_path / "reviews.csv").write_text(
        "\n".join(["stars,review", *(f'{1 + i % 2},"{text}"' for i, text in enumerate(texts[:40]))])
    )

    rows = {
        "texts": [{"id": i, "text": text} for i, text in enumerate(texts)],
        "pairs": [{"anchor": text, "positive": word} for word, text in zip(words, texts)],
    }
    rows["mine"] = rows["texts"][:450]
    rows["validation"] = rows["texts"][450:]
    rows["test"] = rows["pairs"][500:]
    rows["pairs"] = rows["pairs"][:500]
    reviews = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts[:40])]
    rows |= {f"my_folder/sst2/{split}": reviews for split in ("train", "validation")}

    for name, table_ in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in table_), encoding="utf-8")
    return tmp_path


def serve(words, clone):
    """Start the server, request an embedding and stop the server.

    Returns:
        The expected text of the row in `SMALL`.
    """
    address = f"http://127.0.0.1:{(port := free_port())}"
    body = json.dumps({"model": "sentence-encoder", "input": ["a text"]}).encode()
    request = urllib.request.Request(
        f"{address}/v1/embeddings", body, {"Content-Type": "application/json"}
    )
    command = [sys.executable, "-m", *words, "--port", port]
    with server(command, f"{address}/health", clone / "log"):
        with urllib.request.urlopen(request, timeout=900) as response:
            embedding = json.load(response)["data"][0]["embedding"]
    assert sum(x * x for x in embedding) == pytest.approx(1, abs=1e-3)
    return "serves"


@pytest.mark.parametrize("task", ROWS)
def test_commands_of_task(task, clone, environment, monkeypatch):
    """Run the commands of one task and check the output of the last one."""
    monkeypatch.chdir(clone)
    options, expected = SMALL[task]
    lines = commands(ROWS[task])
    # The model is that of the first row.
    if "first row" in task:
        first = next(iter(ROWS))
        options = [*SMALL[first][0], *options]
        lines = [*commands(ROWS[first]), *lines]
    assert len(lines) == len(options), f"SMALL must have one list of options for each of {lines}."

    paths = {"ENCODER": "examples/sentence-encoder", "MLM": "runs/demo"}
    for words, small_options in zip(lines, options):
        words = [paths.get(word, word) for word in words]
        if words[:2] == ["neobert", "serve"]:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            printed = serve(words, clone)
            continue

        start = {"python": [sys.executable], "neobert": [sys.executable, "-m", "neobert"]}
        process = subprocess.run(
            [*start[words[0]], *words[1:], *small_options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        error = FROM_THE_HUB.get(task, "")
        assert process.returncode == (2 if error else 0) and error in process.stderr, (
            f"{shlex.join(words)}: {process.stderr[-3000:]}"
        )
        printed = process.stdout

    assert expected in printed or (clone / expected).is_file(), printed[-2000:]
