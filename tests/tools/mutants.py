"""Mutation testing: break the code in one place at a time and check that a test fails.

    python tests/tools/mutants.py neobert/attention_neobert.py    # the mutants of one file
    python tests/tools/mutants.py --output results/mutants.md     # all mutants

tests/mutants/ has one JSON table per source file, such as
neobert/pretraining/masking.json. A row contains
the name of the mutant, the tests that should fail, and pairs of a text and its replacement. Each
mutant is applied to a copy of the checkout in a temporary folder, where its tests run until the
first failure. The exit status is 1 if a mutant survives, or if a test fails without a mutant.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tqdm import tqdm


ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "mutants"
# Libraries that are imported before forking, if they are installed, which saves time.
LIBRARIES = ("transformers", "datasets", "accelerate", "sentence_transformers", "scipy.stats")
PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no", "--maxfail=1")

# `file` is a path relative to the repository, `tests` are node IDs relative to tests/, and
# `changes` are pairs (text, replacement).
Mutant = namedtuple("Mutant", ("name", "file", "tests", "changes"))


def read_mutants(files=()):
    """Return the mutants of some source files, or of all files that have a table.

    Args:
        files: Paths relative to the repository.
    """
    tables = sorted(TABLES.rglob("*.json"))
    if files:
        tables = [TABLES / Path(file).with_suffix(".json") for file in files]
    for table in tables:
        if not table.is_file():
            raise SystemExit(f"This file has no mutants: {table.relative_to(ROOT)} does not exist.")
    mutants = []
    for table in tables:
        file = table.relative_to(TABLES).with_suffix(".py").as_posix()
        for name, tests, *texts in json.loads(table.read_text(encoding="utf-8")):
            changes = list(zip(texts[::2], texts[1::2], strict=True))
            mutants.append(Mutant(name, file, tests.split(), changes))
    return mutants


def apply_mutant(text, mutant):
    """Return the text of a source file with the changes of a mutant.

    Raises:
        SystemExit: If the file does not contain a text that the mutant replaces.
    """
    for old, new in mutant.changes:
        if old not in text:
            raise SystemExit(
                f"Mutant {mutant.name!r}: {mutant.file} has no {old!r}; it must follow the code."
            )
        text = text.replace(old, new)
    return text


def copy_checkout(folder):
    """Copy the tracked and untracked files of the checkout to `folder`/checkout.

    Returns:
        Path of the copy.
    """
    names = subprocess.check_output(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), cwd=ROOT, text=True
    )
    for name in names.split("\0"):
        source = ROOT / name
        target = folder / "checkout" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    return folder / "checkout"


def write(path, text):
    """Write a file of the package, and its copy in the repository root if it is a model file."""
    path.write_text(text, encoding="utf-8")
    source = path.parents[1] / path.name
    if path.name.endswith("_neobert.py") and source.is_file():
        source.write_text(text, encoding="utf-8")


def run_tests(checkout, tests):
    """Run tests until the first failure.

    The tests run in a fork of this process, which has imported torch and transformers, but no
    module of the package.

    Args:
        checkout: Copy of the repository.
        tests: Node IDs relative to tests/.

    Returns:
        Node IDs of the failed tests, and the last line that pytest printed.

    Raises:
        SystemExit: If pytest could not run the tests.
    """
    log = checkout.parent / "log"
    child = os.fork()
    if child == 0:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        os.environ["PYTHONPATH"] = str(checkout)
        sys.dont_write_bytecode = True
        code = pytest.main([*PYTEST, *(f"tests/{test}" for test in dict.fromkeys(tests))])
        sys.stdout.flush()
        os._exit(code)

    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text()
    if status not in (0, 1, 2):
        raise SystemExit(f"pytest could not run: {output[-2000:]}")

    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", output, flags=re.MULTILINE)
    lines = [line for line in output.splitlines() if line.strip()]
    return failed, lines[-1].strip("= ")


def main():
    """Run the mutants, print a Markdown page of the results and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="Source files. By default all that have mutants.")
    parser.add_argument("--output", type=Path, help="Markdown file to write.")
    parser.add_argument(
        "--only", default="", help="Run only the mutants whose name contains this text."
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    mutants = [m for m in read_mutants(arguments.files) if arguments.only in m.name]
    rows = []
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_checkout(Path(folder))
        failed, control = run_tests(checkout, [test for m in mutants for test in m.tests])
        if failed:
            raise SystemExit(f"The tests fail without a mutant: {', '.join(failed)}")

        for mutant in tqdm(mutants, unit="mutant"):
            path = checkout / mutant.file
            original = path.read_text(encoding="utf-8")
            write(path, apply_mutant(original, mutant))
            failed, _ = run_tests(checkout, mutant.tests)
            write(path, original)
            killers = ", ".join(f"`{test}`" for test in failed) or "**survived**"
            rows.append([mutant.file, mutant.name, killers])
            if not failed:
                survivors.append(mutant.name)

    # The package is imported last, because the forks above must import the modified copy.
    from neobert.common.environment import environment
    from neobert.common.tables import markdown_table

    killed = len(mutants) - len(survivors)
    text = "\n\n".join(
        (
            "# Mutants",
            "The code is broken in one place at a time; the tests run until one has failed. "
            "Written by `python tests/tools/mutants.py`.",
            markdown_table(["file", "mutant", "killed by"], rows),
            f"Without a mutant: {control}. Killed: {killed} of {len(mutants)}.",
            markdown_table(
                ["run", ""], [[name, str(value)] for name, value in environment().items()]
            ),
        )
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
