"""Run the examples of the documentation pages, and compare or update their outputs.

    python tests/tools/pages.py                             # list the outdated outputs
    python tests/tools/pages.py --write docs/serving.md     # update the outputs of this page

The pages are README.md, docs/ and the model cards in examples/. The code blocks of a page run in
their order, in one temporary folder with links to the files of the repository. The Python blocks
of a page share a process, but no variables. These blocks run:

- a ```bash block that is followed by a block without a language, which shows its output;
- a ```python block that ends with comment lines, which show its output;
- a ```bash block without an output that is marked with `<!-- run -->`, because a later block needs
  its files.

A mark is an HTML comment on the line before a block. `<!-- not run: REASON -->` skips the block. A
line `...` in an output stands for any number of lines. `chandar-lab/NeoBERT` is replaced by the
bundled model.

Words and integers must be equal, and other numbers must agree within `TOLERANCE`. Times and rates
are not compared. The pages of results/ that depend on the bundled encoder must name its digest.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
# Relative tolerance of numbers with a decimal point. One unit of the last digit is also allowed.
TOLERANCE = 0.01
# Maximum time of a block in seconds.
TIMEOUT = 900
# The published model and its hidden size.
PUBLISHED = "chandar-lab/NeoBERT"
HIDDEN_SIZE = "768"
# Pages of results/ with figures of the bundled encoder.
ENCODERS = [
    *("block_transfer", "distillation", "engines", "int8_cpu_bundled", "long_documents"),
    *("open_text", "sentiment_encoder/sentiment", "small_vectors", "finetuning", "latency"),
    *("peers", "server", "server_workers", "contrastive/wordnet"),
]

# Program that runs the Python blocks of a page, each with its own variables. It reads a JSON string
# with the code from each line of stdin, and prints {"printed": output, "error": traceback or null}.
# One process for all blocks imports the libraries once.
INTERPRETER = """
import contextlib, io, json, sys, traceback

for line in sys.stdin:
    output, error = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            exec(compile(json.loads(line), "<block>", "exec"), {"__name__": "__main__"})
        except Exception:
            error = traceback.format_exc()
    print(json.dumps({"printed": output.getvalue(), "error": error}), flush=True)
"""

_BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = ("not run", "read", "run: make")
_INSTALL = re.compile(r"^\S*(?:pip|apt-get) install .*\n", re.MULTILINE)
_TIME = re.compile(r"[\d.,]+ (?:ms|s|seconds|minutes|tokens/s|tokens a second)\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
_DIGEST = re.compile(r"[Ee]ncoder `([0-9a-f]{12})`(, an earlier encoder)?")


@dataclass
class Example:
    """A block that runs, and its output on the page.

    Attributes:
        language: "bash" or "python".
        source: Code to run.
        start: Start of the output in the text of the page.
        end: End of the output. If the page shows no output, `end` equals `start`.
        shown: Output on the page, without comment characters.
    """

    language: str
    source: str
    start: int
    end: int
    shown: str


def examples(text):
    """Yield the `Example`s in the text of a page."""
    blocks = list(_BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None]):
        mark, language, source = block.groups()
        if (mark or "").startswith(_LEFT_OUT):
            continue

        if language == "python":
            code, comments = re.fullmatch(r"(.*?)((?:^# .*\n)*)", source, re.S | re.M).groups()
            if comments:
                start = block.start(3) + len(code)
                shown = re.sub("^# ", "", comments, flags=re.MULTILINE)
                yield Example(language, code, start, start + len(comments), shown)
        elif language == "bash":
            follows = after and not after[2] and not text[block.end() : after.start()].strip()
            if follows:
                yield Example(language, source, after.start(3), after.end(3), after[3])
            elif mark == "run":
                yield Example(language, source, block.end(), block.end(), "")


class Workspace:
    """Temporary folder with links to the files of the repository, in which the examples run.

    It is a context manager, which ends the Python interpreter of the page and removes the folder.

    Attributes:
        folder: Path of the folder, with symbolic links resolved.
        environment: Environment variables of the examples.
    """

    def __init__(self):
        self._holder = tempfile.TemporaryDirectory(prefix="neobert-page-")
        self._interpreter = None
        self.folder = Path(self._holder.name).resolve()
        for path in ROOT.iterdir():
            if path.name not in ("runs", ".git"):
                (self.folder / path.name).symlink_to(path)

        (self.folder / "runs").mkdir()
        programs = self.folder / "bin"
        programs.mkdir()
        for name, words in (("python", ""), ("neobert", " -m neobert")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
            (programs / name).chmod(0o755)
        paths = f"{programs}:{os.environ['PATH']}"
        variables = {"PATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.environment = {**os.environ, **variables}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._interpreter is not None:
            self._interpreter.kill()
            self._interpreter.communicate()
        self._holder.cleanup()

    def run(self, example):
        """Run an example and return its output.

        Args:
            example: Example to run.

        Raises:
            RuntimeError: If the example fails, or a Python block takes longer than `TIMEOUT`.
            subprocess.TimeoutExpired: If a bash block takes longer than `TIMEOUT`.
        """
        source = example.source
        uses_published = PUBLISHED in example.source
        if uses_published:
            bundled = self.folder / "runs" / "bundled"
            if not bundled.exists():
                self._run_bash(f"python convert_checkpoint.py examples/checkpoint {bundled}")
            source = source.replace(PUBLISHED, str(bundled))

        is_bash = example.language == "bash"
        printed = self._run_bash(_INSTALL.sub("", source)) if is_bash else self._run_python(source)
        printed = printed.replace(f"{self.folder}/", "")
        if uses_published:
            hidden_size = json.loads((bundled / "config.json").read_text())["hidden_size"]
            printed = printed.replace(str(hidden_size), HIDDEN_SIZE)
        return printed.rstrip() + "\n"

    def _run_bash(self, source):
        """Run a bash block in a process of its own."""
        process = subprocess.run(
            ["bash", "-e", "-c", source],
            cwd=self.folder,
            env=self.environment,
            timeout=TIMEOUT,
            text=True,
            capture_output=True,
        )
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}: {process.stderr[-500:]}")
        return process.stdout

    def _run_python(self, source):
        """Run a Python block in the interpreter of the page."""
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-c", INTERPRETER],
                cwd=self.folder,
                env=self.environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        timer = threading.Timer(TIMEOUT, self._interpreter.kill)
        timer.start()
        self._interpreter.stdin.write(json.dumps(source) + "\n")
        self._interpreter.stdin.flush()
        answer = self._interpreter.stdout.readline()
        timer.cancel()
        if not answer:
            status = self._interpreter.wait()
            # The next Python block starts another interpreter.
            self._interpreter = None
            raise RuntimeError(f"exit status {status}")
        result = json.loads(answer)
        if result["error"]:
            raise RuntimeError(result["error"][-500:])
        return result["printed"]


def _close(first, second):
    """Return whether two numbers, given as text, agree within the tolerance."""
    if first == second or not {".", "e"} & {*first, *second}:
        return first == second
    decimals = max(len(number.partition(".")[2]) for number in (first, second))
    first, second = (float(number.replace(",", "")) for number in (first, second))
    allowed = max(
        TOLERANCE * max(abs(first), abs(second)), 1.01 * 10.0**-decimals if decimals else 0
    )
    return abs(first - second) <= max(allowed, 1e-4)


def same(shown, printed, exact=False):
    """Return whether two outputs agree except for white space and times.

    Args:
        shown: Output on a page.
        printed: Output of the example.
        exact: Whether numbers must be equal. By default, small differences are ignored.
    """
    texts = [_TIME.sub("TIME", text).split() for text in (shown, printed)]
    texts = [" ".join(words) for words in texts]
    if _NUMBER.sub("0", texts[0]) != _NUMBER.sub("0", texts[1]):
        return False
    return texts[0] == texts[1] if exact else all(map(_close, *map(_NUMBER.findall, texts)))


def shortened(printed, shown):
    """Return the lines of an output that belong on the page.

    Without a line `...` on the page, these are all lines. Otherwise, they are the lines that are
    most similar to the lines that the page shows.

    Args:
        printed: Complete output.
        shown: Output on the page.
    """
    if "...\n" not in shown:
        return printed
    lines = printed.splitlines()
    shown_lines = []
    for line in shown.splitlines():
        matches = [line] if line == "..." else difflib.get_close_matches(line, lines, 1, 0)
        shown_lines += matches
    return "\n".join(shown_lines) + "\n"


def outputs(page):
    """Run the examples of a page and yield their outputs.

    Yields:
        (example, output as the page shows it, None), or (example, None, error message). Examples
        that succeed and show no output are omitted.
    """
    with Workspace() as workspace:
        for example in examples(page.read_text(encoding="utf-8")):
            try:
                printed = workspace.run(example)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                yield example, None, str(error)
                continue
            if example.shown:
                yield example, shortened(printed, example.shown), None


def stale(page):
    """Yield a message for each example of a page that fails or has an outdated output."""
    for example, printed, error in outputs(page):
        first = example.source.strip().splitlines()[0]
        if error:
            yield f"{page.name}: {first}\n{error}"
        elif not same(example.shown, printed):
            lines = example.shown.splitlines(), printed.splitlines()
            yield "\n".join([f"{page.name}: {first}", *difflib.ndiff(*lines)])


def written(page):
    """Return the text of a page with current outputs.

    Outputs that differ in times alone are not changed.

    Raises:
        SystemExit: If an example fails.
    """
    text = page.read_text(encoding="utf-8")
    for example, printed, error in reversed(list(outputs(page))):
        if error:
            raise SystemExit(f"{page.name}: {example.source}\n{error}")
        if not same(example.shown, printed, exact=True):
            if example.language == "python":
                printed = "".join(f"# {line}\n" for line in printed.splitlines())
            text = text[: example.start] + printed + text[example.end :]
    return text


def stale_results():
    """Return a message for each page of results/ that names another encoder than the bundled one.

    Pages that describe their encoder as an earlier encoder are accepted.
    """
    from neobert.common.identity import model_digest

    current = model_digest(str(ROOT / "examples" / "sentence-encoder"))
    messages = []
    for name in ENCODERS:
        text = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
        digest, earlier = next(iter(_DIGEST.findall(text)), ("none", ""))
        if digest != current and not earlier:
            messages.append(
                f"results/{name}.md: encoder {digest}, but the bundled one is {current}"
            )
    return messages


def main():
    """Compare or update the outputs of the pages, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", nargs="*", type=Path, default=PAGES, help="Pages. By default all of them."
    )
    parser.add_argument(
        "--write", action="store_true", help="Replace outdated outputs in the pages."
    )
    arguments = parser.parse_args()

    if arguments.write:
        for page in arguments.pages:
            page.write_text(written(page), encoding="utf-8")
        return 0

    count = 0
    for page in arguments.pages:
        for text in stale(page.resolve()):
            count += 1
            print(text, end="\n\n", flush=True)
    for text in stale_results():
        count += 1
        print(text)
    print(f"{count} outputs are outdated." if count else "All outputs are current.")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
