"""Runs the commands of the pages, and compares or writes what they print below them.

    python tests/tools/pages.py                             # says which outputs are not today's
    python tests/tools/pages.py --write docs/serving.md     # writes today's into this page

The pages are README.md, docs/ and the cards in examples/. The blocks of a page run in their order,
in one folder with links to the files of the repository. What is run:

- a ```bash block with a block without a language below it, its output;
- a ```python block whose last lines are comments, its output;
- a ```bash block without an output that is marked `<!-- run -->`, because a later one needs it.

A mark is a comment on the line before a block. `<!-- not run: REASON -->` leaves the block out. A
line `...` in an output stands for any lines. `chandar-lab/NeoBERT` is the bundled model here.

Texts and whole numbers must be the same, other numbers within `TOLERANCE`; times and rates are not
compared. The pages of results/ that depend on the bundled encoder name its digest.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
TOLERANCE = 0.01  # of a number with a decimal point; or one unit of its last place
SECONDS = 400  # that a block may take
PUBLISHED, WIDTH = "chandar-lab/NeoBERT", "768"
# The pages of results/ whose figures are of the bundled encoder.
ENCODERS = [
    *("block_transfer", "distillation", "engines", "int8_cpu_bundled", "long_documents"),
    *("open_text", "sentiment_encoder/sentiment", "small_vectors"),
]

_BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LEFT_OUT = ("not run", "read", "run: make")
_INSTALL = re.compile(r"^\S*(?:pip|apt-get) install .*\n", re.MULTILINE)
_TIME = re.compile(r"[\d.,]+ (?:ms|s|seconds|minutes|tokens/s|tokens a second)\b")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
_DIGEST = re.compile(r"[Ee]ncoder `([0-9a-f]{12})`(, an earlier encoder)?")


@dataclass
class Example:
    """A block that is run, and its output on the page.

    Attributes:
        language: "bash" or "python".
        source: what is run.
        start, end: of the output in the page's text; alike where it shows none.
        shown: the output, without the marks of comments.
    """

    language: str
    source: str
    start: int
    end: int
    shown: str


def examples(text):
    """The `Example`s of a page."""
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


def run(example, folder):
    """What an example prints.

    Raises:
        RuntimeError: it fails.
    """
    source, published = example.source, PUBLISHED in example.source
    if published:
        bundled = folder / "runs" / "bundled"
        if not bundled.exists():
            convert = ["convert_checkpoint.py", "examples/checkpoint", str(bundled)]
            subprocess.run([sys.executable, *convert], cwd=folder, check=True, capture_output=True)
        source = source.replace(PUBLISHED, str(bundled))
    if example.language == "bash":
        command = ["bash", "-e", "-c", _INSTALL.sub("", source)]
    else:
        command = [sys.executable, "-c", source]
    paths = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings = {"cwd": folder, "env": environment, "timeout": SECONDS, "text": True}
    done = subprocess.run(command, capture_output=True, **settings)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-500:]}")
    printed = done.stdout.replace(f"{folder}/", "")
    if published:
        width = json.loads((bundled / "config.json").read_text())["hidden_size"]
        printed = printed.replace(str(width), WIDTH)
    return printed.rstrip() + "\n"


def place():
    """A folder to run the examples of a page in, as a context."""
    holder = tempfile.TemporaryDirectory(prefix="neobert-page-")
    folder = Path(holder.name).resolve()
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "runs").mkdir()
    (folder / "bin").mkdir()
    for name, words in (("python", ""), ("neobert", " -m neobert")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return holder, folder


def _close(one, other):
    if one == other or not {".", "e"} & {*one, *other}:
        return one == other
    places = max(len(number.partition(".")[2]) for number in (one, other))
    one, other = (float(number.replace(",", "")) for number in (one, other))
    allowed = max(TOLERANCE * max(abs(one), abs(other)), 1.01 * 10.0**-places if places else 0)
    return abs(one - other) <= max(allowed, 1e-4)


def same(shown, printed):
    """Whether two outputs say the same."""
    pairs = [_TIME.sub("TIME", text).split() for text in (shown, printed)]
    pairs = [" ".join(words) for words in pairs]
    if _NUMBER.sub("0", pairs[0]) != _NUMBER.sub("0", pairs[1]):
        return False
    return all(map(_close, *map(_NUMBER.findall, pairs)))


def shortened(printed, shown):
    """The lines of an output that the page shows: all, or with `...` those most like its own."""
    if "...\n" not in shown:
        return printed
    lines = printed.splitlines()
    kept = []
    for line in shown.splitlines():
        close = [line] if line == "..." else difflib.get_close_matches(line, lines, 1, 0)
        kept += close
    return "\n".join(kept) + "\n"


def outputs(page):
    """(`Example`, what it prints as the page shows it, None) of each of a page's examples, or
    (`Example`, None, why it failed)."""
    holder, folder = place()
    with holder:
        for example in examples(page.read_text(encoding="utf-8")):
            try:
                printed = run(example, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                yield example, None, str(error)
                continue
            if example.shown:
                yield example, shortened(printed, example.shown), None


def stale(page):
    """What is not today's in a page, a text each."""
    for example, printed, error in outputs(page):
        first = example.source.strip().splitlines()[0]
        if error:
            yield f"{page.name}: {first}\n{error}"
        elif not same(example.shown, printed):
            lines = example.shown.splitlines(), printed.splitlines()
            yield "\n".join([f"{page.name}: {first}", *difflib.ndiff(*lines)])


def written(page):
    """The page's text with today's outputs; those that say the same stay as they are."""
    text = page.read_text(encoding="utf-8")
    for example, printed, error in reversed(list(outputs(page))):
        if error:
            raise SystemExit(f"{page.name}: {example.source}\n{error}")
        if not same(example.shown, printed):
            if example.language == "python":
                printed = "".join(f"# {line}\n" for line in printed.splitlines())
            text = text[: example.start] + printed + text[example.end :]
    return text


def stale_results():
    """The pages of results/ that do not name the digest of today's encoder, nor say that theirs is
    an earlier one."""
    from neobert.common.identity import model_digest

    today = model_digest(str(ROOT / "examples" / "sentence-encoder"))
    found = []
    for name in ENCODERS:
        text = (ROOT / "results" / f"{name}.md").read_text(encoding="utf-8")
        digest, earlier = next(iter(_DIGEST.findall(text)), ("none", ""))
        if digest != today and not earlier:
            found.append(f"results/{name}.md: encoder {digest}, today's is {today}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--write", action="store_true", help="today's outputs into the pages")
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
    print(f"{count} are not today's" if count else "every output is today's")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
