"""Test the bundled sentence encoder.

It loads in a process that cannot import this package, stays small, and retrieves texts by meaning.
Its model card has the figures of results/.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml


pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer

from neobert.embeddings.packed_encoder import PackedEncoder


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "sentence-encoder"
DEFINITIONS = ROOT / "examples" / "definitions.tsv"


@pytest.fixture(scope="module")
def encoder():
    return SentenceTransformer(str(FOLDER), device="cpu")


def test_max_length_is_consistent_across_files():
    """All files that set the maximum sequence length contain the same value.

    Different libraries read different files.
    """
    readers = {
        "sentence_bert_config.json": lambda data: data["max_seq_length"],
        "tokenizer_config.json": lambda data: data["model_max_length"],
        "tokenizer.json": lambda data: data["truncation"]["max_length"],
    }
    lengths = {length(json.loads((FOLDER / name).read_text())) for name, length in readers.items()}
    assert lengths == {256}


def test_encoder_size():
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 24_000_000, f"The folder must be at most 24 MB, got {size:,} bytes."


@pytest.mark.slow
def test_encoder_loads_without_this_package(tmp_path, encoder):
    """The encoder loads with its own code in another process, and gives the same embeddings."""
    code = (
        "import sys, json; from sentence_transformers import SentenceTransformer; "
        f"model = SentenceTransformer({str(FOLDER)!r}, trust_remote_code=True, device='cpu'); "
        "assert 'neobert' not in sys.modules; "
        "print(json.dumps([model.max_seq_length, model.encode(['a bird of prey']).tolist()]))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert process.returncode == 0, process.stderr

    length, (embedding,) = json.loads(process.stdout.splitlines()[-1])
    assert length == 256 and len(embedding) == 384
    assert embedding == pytest.approx(encoder.encode("a bird of prey").tolist(), abs=1e-5)


def test_encoder_runs_packed_in_every_precision(encoder):
    """`PackedEncoder` runs the encoder without padding, and agrees with sentence-transformers."""
    texts = ["a bird of prey", "The committee met again, and nothing was decided.", "rain"]
    # The embeddings of the encoder are normalized.
    expected = encoder.encode(texts)
    for dtype, min_cosine in (("float32", 0.99999), ("float16", 0.99999), ("bfloat16", 0.9995)):
        packed = PackedEncoder(str(FOLDER), dtype=dtype, device="cpu")
        assert packed.packs, "The encoder must run without padding."
        embeddings = packed.encode(texts)
        cosines = (embeddings * expected).sum(1) / np.linalg.norm(embeddings, axis=1)
        # A single word is the worst case, because its rounding errors are not averaged over tokens.
        assert cosines.min() > min_cosine, f"{dtype}: {cosines}"


def test_package_tokenizes_in_batches(monkeypatch):
    """`encode` of the package keeps only token ids, and its batches do not depend on the chunks."""
    path = ROOT / "packages" / "sentence-encoder" / "neobert_sentence_encoder" / "__init__.py"
    spec = importlib.util.spec_from_file_location("neobert_sentence_encoder", path)
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)

    monkeypatch.setattr(package, "MODEL_FOLDER", FOLDER)
    tokenizer = package._tokenizer()
    texts = ["word " * (7 * number % 301) for number in range(1100)]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    sizes = []
    widths = []

    class Tokenizer:
        def encode_batch(self, batch):
            sizes.append(len(batch))
            return tokenizer.encode_batch(batch)

    class Session:
        def run(self, names, inputs):
            widths.append(inputs["input_ids"].shape[1])
            sums = inputs["input_ids"].sum(1, keepdims=True)
            return [np.broadcast_to(sums, (len(sums), 384)).astype(np.float32)]

    monkeypatch.setattr(package, "_tokenizer", Tokenizer)
    monkeypatch.setattr(package, "_session", Session)
    embeddings = package.encode(texts, batch_size=10)
    assert sizes == [1024, 76]
    # All texts are sorted by length, not those of a chunk.
    assert widths == sorted(lengths)[9::10]
    expected = [sum(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    assert embeddings[:, 0].tolist() == expected


def test_paraphrases_retrieve_definitions(encoder):
    """A paraphrase retrieves the definition of the word that it describes."""
    rows = [line.split("\t") for line in DEFINITIONS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8000 and all(len(row) == 2 and all(row) for row in rows)
    words = {
        "where do i borrow books": "library",
        "doctor for teeth": "dentist",
        "someone who writes novels": "novelist",
    }
    rows = rows[::40] + [row for row in rows if row[0].split(", ")[0] in words.values()]

    embeddings = encoder.encode([definition for _, definition in rows])
    for query, word in words.items():
        best = rows[int(encoder.similarity(encoder.encode(query), embeddings)[0].argmax())]
        assert best[0].startswith(word), f"{query}: {best}"


def test_figures_describe_the_stored_weights():
    """result.json describes the stored weights, not only those at the end of the training."""
    figures = json.loads((FOLDER / "result.json").read_text())
    last = figures["agreement"][-1]
    assert last["step"] == figures["steps"]
    # The stored weights in float16 and float8 agree with the teacher as well as those of the
    # training.
    for source in ("validation", "tweets", "editorials", "movies"):
        stored = figures["stored"][f"{source}_spearman"]
        assert stored == pytest.approx(last[f"{source}_spearman"], abs=0.001)


def test_model_card_metadata_and_definition_ratio():
    """The model card names the teacher and the licenses, and its ratio on definitions is measured.

    The ratio is that of the retrieval of WordNet definitions in results/encoder_tasks/.
    """
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert metadata["license"] == "apache-2.0"
    # The Hub accepts no other relations.
    assert metadata["base_model_relation"] in ("adapter", "finetune", "merge", "quantized")

    scores = [
        json.loads((ROOT / "results" / "encoder_tasks" / f"{name}.json").read_text())["scores"]
        for name in ("sentence-encoder", "all-MiniLM-L6-v2")
    ]
    ratio = scores[0]["WordNetRetrieval"] / scores[1]["WordNetRetrieval"]
    page = (ROOT / "results" / "block_transfer.md").read_text(encoding="utf-8")
    assert f"| {ratio:.3f} |" in card and f"| {ratio:.3f} |" in page

    assert "GCIDE (GPL-2 or later)" in card and "not settled" in card
    assert card.index("Retrieval on 13 types") < card.index("On dictionary definitions"), (
        "The results on text that is not from the training domain must come first."
    )


def test_model_card_tables_match_benchmark_results():
    """The retrieval tables of the model card have the figures of results/open_text.md."""
    page = (ROOT / "results" / "open_text.md").read_text(encoding="utf-8")
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    by_type, systems = (
        {row[0]: row[1:] for row in table_rows(part)[1:]}
        for part in page.split("\n\n")
        if part.startswith(("| MRR@10 |", "| System |"))
    )
    tables = [table_rows(part) for part in card.split("\n\n") if part.startswith("|")]

    # Rows of the first table, and the names of these systems in results/open_text.md.
    names = {
        "all-MiniLM-L6-v2, the teacher": "teacher",
        "the teacher with layers 0, 1, 4, 5, without training": "teacher, layers 0, 1, 4, 5",
        "the teacher with layers 0, 1, 4, 5, fine-tuned": "teacher, layers 0, 1, 4, 5, fine-tuned",
        "this encoder": "encoder",
        "paraphrase-MiniLM-L3-v2": "paraphrase-MiniLM-L3-v2, 256 tokens",
        "paraphrase-MiniLM-L3-v2, 128 tokens": "paraphrase-MiniLM-L3-v2, 128 tokens",
        "BM25": "BM25",
        "static embeddings of the teacher (model2vec)": "static embeddings",
    }
    rows = {row[0]: row[1:] for row in tables[0][1:]}
    for name, system in names.items():
        assert rows.pop(name) == systems[system], name
    # The remaining row, with different encoders for queries and documents, is in the other table.
    (asymmetric,) = rows.values()
    assert asymmetric[0] == by_type["mean"][8]

    rows = {row[0]: row[1:] for row in tables[1][1:]}
    assert rows.keys() == by_type.keys()
    for name, row in rows.items():
        expected = by_type[name]
        ratio, error = expected[9].split(" ± ")
        assert row == [expected[1], expected[2], expected[4], expected[6], ratio, error], name


def table_rows(text):
    """Return the cells of a Markdown table without its separator line."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [lines[0], *lines[2:]]
