"""Real text that this project did not write: docstrings of installed packages."""

import ast
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path


PACKAGES = ("numpy", "scipy", "pandas", "torch", "sklearn", "networkx", "sympy")


@dataclass(frozen=True)
class Docstring:
    """A documented function.

    Attributes:
        package: Top-level package.
        name: Words of the function's name, such as "compute default colors".
        summary: First paragraph of its docstring, on one line.
    """

    package: str
    name: str
    summary: str


def read_docstrings(per_package: int, seed: int = 0) -> list[Docstring]:
    """Return a random sample of documented functions of each installed package, shuffled."""
    paths = sysconfig.get_paths()
    folders = {"stdlib": Path(paths["stdlib"])}
    folders |= {package: Path(paths["purelib"]) / package for package in PACKAGES}

    generator = random.Random(seed)
    sample: list[Docstring] = []
    for package, folder in folders.items():
        files = sorted(folder.glob("*.py") if package == "stdlib" else folder.rglob("*.py"))
        files = [file for file in files if "test" not in str(file.relative_to(folder))]
        functions = {}
        for path in files[:400]:
            for docstring in _functions(package, path):
                functions.setdefault(docstring.summary, docstring)
        texts = sorted(functions.values(), key=lambda docstring: docstring.summary)
        sample.extend(generator.sample(texts, min(per_package, len(texts))))
    generator.shuffle(sample)
    return sample


def _functions(package: str, path: Path) -> list[Docstring]:
    """Return the documented functions of a file, or an empty list if it does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []

    docstrings = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        words = " ".join(re.sub(r"([a-z])([A-Z])", r"\1 \2", node.name).split("_")).strip().lower()
        summary = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
        if len(words.split()) > 1 and 40 < len(summary) < 300:
            docstrings.append(Docstring(package, words, summary))
    return docstrings
