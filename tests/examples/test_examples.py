"""Test the scripts of examples/.

- The training examples learn small tasks in a few steps, and docs/embeddings.md shows their output.
- Existing outputs are not modified, and an error is one line.
- Saved folders load without this package.
- Padding tokens are not computed.
"""

import importlib.util
import inspect
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.reference import count_rows
from tools import pages

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError
from neobert.common.scripts import load_rows, run_script
from neobert.conversion.command import main as convert


datasets = pytest.importorskip("datasets")
import pandas  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


ROOT = Path(__file__).resolve().parents[2]
ENCODER = ROOT / "examples" / "sentence-encoder"
COLORS = "red green blue white black brown yellow purple".split()
THINGS = "house boat tree road horse garden table church".split()
NAMES = "john mary peter anna".split()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Return the folder of a small random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = {"intermediate_size": 96, "max_position_embeddings": 64, "embedding_init_range": 0.3}
    NeoBERTModel(NeoBERTConfig(**shape, **fields)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Give each test its own cache of data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def example(name):
    """Import a script of examples/ and return its module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, data, model_folder, tmp_path, make_row, epochs="6"):
    """Train an example on generated rows, check its output folder and return its metrics.

    Args:
        name: Name of the script.
        data: Folder for the training and test rows.
        model_folder: Folder of the initial model.
        tmp_path: Parent of the output folder.
        make_row: Function that returns a row for a random generator.
        epochs: Number of epochs, as text.
    """
    generator = random.Random(0)
    for split, count in (("train", 320), ("test", 64)):
        data.mkdir(exist_ok=True)
        (data / f"{split}.jsonl").write_text(
            "".join(json.dumps(make_row(generator)) + "\n" for _ in range(count))
        )

    output = tmp_path / "out"
    options = f"--model {model_folder} --data {data} --output {output} --learning-rate 3e-3"
    metrics = example(name).main([*options.split(), "--epochs", epochs])
    assert (output / "config.json").is_file() and (output / "tokenizer.json").is_file()
    return metrics


@pytest.mark.slow
def test_text_classification(model_folder, tmp_path):
    """The classifier learns labels that depend on one word, and saves their names."""

    def row(generator):
        name = generator.choice(NAMES)
        thing = generator.choice(THINGS)
        return {
            "text": f"{name} saw the {thing}",
            "label": "person" if name in ("john", "peter") else "other",
        }

    metrics = run("text_classification", tmp_path / "data", model_folder, tmp_path, row)
    assert metrics["accuracy"] > 0.9 > metrics["baseline"]
    labels = json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]
    assert labels == {"0": "other", "1": "person"}


def error_of(name, *arguments, code=1):
    """Run an example that fails without a traceback, and return the last line of its stderr."""
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == code and "Traceback" not in process.stderr, process.stderr[-3000:]
    return process.stderr.strip().splitlines()[-1]


TRAINERS = ["text_classification", "token_classification", "question_answering", "reranker"]
TRAINERS += ["late_interaction", "matryoshka", "sparse_encoder"]
PAIR = '{"anchor": "a", "positive": "b"}\n'


def write_splits(folder, content):
    """Write the same content to train.jsonl and test.jsonl in a new folder."""
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_bytes(content)


@pytest.mark.parametrize("name", TRAINERS)
def test_data_errors_contain_the_file_path(name, tmp_path):
    """Errors about a training file contain its path, and no output is created."""
    arguments = ["--model", str(ENCODER), "--output", str(tmp_path / "out"), "--data"]
    for content, sentence in (
        (b"", "train.jsonl contains no rows."),
        (b'{"words": "a"}\n', "train.jsonl, row 1: there is no column"),
        ('{"text": "caf\xe9"}\n'.encode("latin-1"), "train.jsonl cannot be read"),
    ):
        folder = tmp_path / f"data{len(content)}"
        write_splits(folder, content)
        with pytest.raises(UserError, match=re.escape(sentence)) as refusal:
            example(name).main([*arguments, str(folder)])
        assert str(folder) in str(refusal.value)

    with pytest.raises(UserError, match="missing/train.jsonl"):
        example(name).main([*arguments, str(tmp_path / "missing")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_refuse_a_missing_model_and_an_existing_output(name, tmp_path):
    output = tmp_path / "out"
    for model in ("/nowhere", str(tmp_path)):
        with pytest.raises(UserError, match=re.escape(model)):
            example(name).main(["--data", "data", "--model", model, "--output", str(output)])
    output.mkdir()
    (output / "mine").write_text("kept")
    with pytest.raises(UserError, match="rm -r "):
        example(name).main(["--data", "data", "--output", str(output)])
    assert [path.name for path in output.iterdir()] == ["mine"]


def test_make_pairs_keeps_an_existing_output(tmp_path):
    (tmp_path / "train.jsonl").write_text("kept")
    with pytest.raises(UserError, match="rm -r "):
        example("make_pairs").main(["--output", str(tmp_path)])
    assert (tmp_path / "train.jsonl").read_text() == "kept"


def test_make_pairs_requires_enough_rows(tmp_path):
    """Numbers of rows that leave test.jsonl without rows are an error."""
    with pytest.raises(UserError, match="at most 7,999 rows together, got 8,500"):
        example("make_pairs").main(["--output", str(tmp_path / "out"), "--train", "8000"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in sorted((ROOT / "examples").glob("*.py"))
        if "from benchmarks" in path.read_text(encoding="utf-8")
    ],
)
def test_scripts_with_benchmarks_start_in_a_clone(name, tmp_path):
    """Scripts that import `benchmarks`, which is not installed, start in any directory."""
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", "--help"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and "--output" in process.stdout, process.stderr[-3000:]


@pytest.mark.slow
def test_missing_wordnet_is_reported_in_one_line(tmp_path):
    code = (
        "import runpy, sys, benchmarks.local_text as text; "
        f"text.WORDNET = {str(tmp_path / 'none')!r}; "
        f"sys.argv = ['make_definitions.py', '--output', {str(tmp_path / 'out')!r}]; "
        f"runpy.run_path({str(ROOT / 'examples' / 'make_definitions.py')!r}, run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2 and "Traceback" not in process.stderr, process.stderr[-3000:]
    message = process.stderr.strip().splitlines()[-1]
    assert message.startswith("make_definitions.py: ") and "none/cntlist.rev" in message


def test_answers_are_located_in_tokens(tmp_path):
    """White space around an answer is ignored, and truncated answers have the label (0, 0)."""
    module = example("question_answering")
    path = tmp_path / "rows.jsonl"
    context = "the house is red and very old"
    rows = [
        {
            "question": "which color?",
            "context": context,
            "answers": {"text": [answer], "answer_start": [context.index(answer)]},
        }
        for answer in (" red ", "red and very old")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spaces, long = module.load_questions(path)
    assert context[spaces["start"] : spaces["end"] + 1] == "red"

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    encoded = tokenizer([spaces["question"]], [context])
    token = encoded.char_to_token(0, context.index("red"), 1)
    assert module.answer_tokens(encoded, 0, spaces["start"], spaces["end"]) == (token, token)

    # The truncated context ends with the first word of the answer.
    encoded = tokenizer(
        [long["question"]], [context], truncation="only_second", max_length=token + 2
    )
    assert encoded.char_to_token(0, long["start"], 1) == token
    assert module.answer_tokens(encoded, 0, long["start"], long["end"]) == (0, 0)

    rows[0]["answers"] = {"text": [" "], "answer_start": [3]}
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="must contain the text of an answer"):
        module.load_questions(path)


def test_tags_are_text(tmp_path):
    """Numeric tags become text, which is the type of the label names of a configuration."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"tokens": ["a", "b"], "tags": [1, 0]}\n')
    assert example("token_classification").load_words(path)[0]["tags"] == ["1", "0"]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_pass_the_warmup_of_the_installed_version(name):
    """No example passes a fraction as `warmup_steps`, which transformers 4 rejects."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert "**warmup_options(0.1)," in source and "warmup_steps=" not in source


def test_load_rows_with_optional_columns(tmp_path):
    """`load_rows` returns an optional column if any row has the column.

    All rows must have the column if it must contain text. Other columns are dropped, and columns of
    texts must contain strings.
    """
    path = tmp_path / "rows.jsonl"
    path.write_text('{"anchor": "a", "positive": "b", "negative": "c", "more": 1}\n')
    rows = load_rows(path, ["anchor", "positive"], optional=["negative"])
    assert rows == [{"anchor": "a", "positive": "b", "negative": "c"}]

    texts = ["anchor", "positive"]
    for number, lines in ((2, path.read_text() + PAIR), (1, PAIR + path.read_text())):
        path.write_text(lines)
        with pytest.raises(UserError, match=f"row {number}: there is no column 'negative'"):
            load_rows(path, texts, optional=["negative"])
        loaded = load_rows(path, texts, optional=["negative"], texts=texts)
        assert sorted(str(row["negative"]) for row in loaded) == ["None", "c"]

    path.write_text('{"text": 1, "label": 2}\n')
    assert load_rows(path, ["text", "label"], texts=[]) == [{"text": 1, "label": 2}]
    with pytest.raises(UserError, match="'text' must be text"):
        load_rows(path, ["text", "label"], texts=["text"])


def test_some_rows_of_the_reranker_may_have_negatives(tmp_path):
    """A row without a negative has a random one, in any order of the rows."""
    path = tmp_path / "rows.jsonl"
    rows = [{"anchor": f"q{i}", "positive": f"a{i}"} for i in range(2)]
    rows[1]["negative"] = "hard"
    for lines in (rows, rows[::-1]):
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
        triplets = example("reranker").load_triplets(str(path))
        assert {row["anchor"]: row["negative"] for row in triplets} == {"q0": "a1", "q1": "hard"}

    path.write_text(json.dumps({**rows[0], "negative": ["a"]}) + "\n")
    with pytest.raises(UserError, match="row 1: `negative` must be text"):
        example("reranker").load_triplets(str(path))


@pytest.mark.parametrize(
    ("name", "load", "good", "bad"),
    [
        (
            "text_classification",
            "load_labeled",
            {"text": "a", "label": 0},
            {"text": "b", "label": None},
        ),
        (
            "token_classification",
            "load_words",
            {"tokens": ["a"], "tags": [0]},
            {"tokens": ["b"], "tags": [None]},
        ),
    ],
)
def test_missing_labels_are_refused(tmp_path, name, load, good, bad):
    """A missing label would become a class "None"."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(UserError, match="row 2: `(label|tags)` must be text or (a )?number"):
        getattr(example(name), load)(str(path))


def test_random_negatives_are_wrong_answers(tmp_path):
    """Random negatives are uniform over the wrong answers of a question, and depend on the seed.

    Rows in which every answer is correct are an error.
    """
    module = example("reranker")
    rows = [{"anchor": f"q{i % 3}", "positive": f"a{i}"} for i in range(6)]
    counts = {}
    for seed in range(300):
        for row in module.add_random_negatives(rows, seed):
            counts.setdefault(row["anchor"], []).append(row["negative"])

    for number in range(3):
        negatives = counts[f"q{number}"]
        wrong = {f"a{i}" for i in range(6) if i % 3 != number}
        assert set(negatives) == wrong
        assert min(map(negatives.count, wrong)) > len(negatives) / 4 - 60

    assert module.add_random_negatives(rows) == module.add_random_negatives(rows)
    with pytest.raises(UserError, match="must have a wrong answer"):
        module.add_random_negatives(rows[:1])


def test_invalid_labels_and_answers_are_reported(tmp_path):
    """Invalid labels and answers are reported as a `UserError`."""
    for name, content, sentence in (
        ("token_classification", b'{"tokens": ["a"], "tags": []}\n', "must be lists of equal"),
        (
            "question_answering",
            b'{"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [1]}}',
            "its position in `context`",
        ),
        (
            "question_answering",
            b'{"question": "a", "context": "b", "answers": {"text": [], "answer_start": []}}',
            "Remove questions without an answer.",
        ),
    ):
        folder = tmp_path / f"{name}{len(content)}"
        write_splits(folder, content)
        with pytest.raises(UserError, match=re.escape(sentence)):
            example(name).main(["--data", str(folder), "--model", str(ENCODER)])


def test_run_script_prints_errors_as_one_line(tmp_path, monkeypatch, capsys):
    """`run_script` prints an error as one line and exits with 2, or with 130 after Ctrl-C."""
    monkeypatch.setattr(sys, "argv", ["folder/mine.py"])

    def fails():
        raise UserError("`x` must be 1, got 2.")

    def is_interrupted():
        raise KeyboardInterrupt

    for main, code, message in (
        (fails, 2, "mine.py: `x` must be 1, got 2.\n"),
        (is_interrupted, 130, "mine.py: interrupted\n"),
        (lambda: {"accuracy": 1.0}, 0, ""),
    ):
        with pytest.raises(SystemExit) as end:
            run_script(main)
        assert end.value.code == code
        assert capsys.readouterr().err == message


@pytest.mark.slow
def test_example_error_starts_with_script_name(tmp_path):
    """The error of an example starts with the name of the script."""
    arguments = ["--data", tmp_path / "missing", "--model", ENCODER, "--output", tmp_path / "out"]
    assert error_of("reranker", *arguments, code=2).startswith("reranker.py: ")


# ------------------------------------------------------------------------------------------------
# examples/search.py


@pytest.fixture
def search(monkeypatch, capfd):
    """Return a function that runs examples/search.py and returns its output.

    If `code` is not 0, the function returns the error. With `in_process=False`, the script runs in
    a process of its own.
    """
    pytest.importorskip("lancedb")
    pytest.importorskip("sentence_transformers")
    module = example("search")
    # The default model is a relative path.
    monkeypatch.chdir(ROOT)

    def run(store, *arguments, code=0, in_process=True):
        path = ROOT / "examples" / "search.py"
        words = [str(path), *map(str, arguments), "--store", str(store)]
        if in_process:
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as error:
                run_script(module.main)
            exit_code = error.value.code
            printed, errors = capfd.readouterr()
        else:
            process = subprocess.run([sys.executable, *words], capture_output=True, text=True)
            exit_code, printed, errors = process.returncode, process.stdout, process.stderr

        assert exit_code == code and "Traceback" not in errors, errors[-3000:]
        return errors.strip().splitlines()[-1] if code else printed

    return run


def ids(printed):
    """Return the IDs of the search results in an output."""
    return re.findall(r"^  (\S+)\t", printed, re.M)


class LettersEncoder:
    """Sentence encoder that counts the letters a to h."""

    def __init__(self, name):
        pass

    def encode_query(self, text, normalize_embeddings):
        counts = np.array([1 + text.count(letter) for letter in "abcdefgh"], np.float32)
        return counts / np.linalg.norm(counts)

    def encode_document(self, texts, normalize_embeddings):
        return np.stack([self.encode_query(text, normalize_embeddings) for text in texts])


@pytest.fixture
def search_module(monkeypatch):
    """Return the module examples/search.py with a fast encoder."""
    pytest.importorskip("lancedb")
    pytest.importorskip("sentence_transformers")
    module = example("search")
    monkeypatch.setattr(module, "SentenceTransformer", LettersEncoder)
    monkeypatch.setattr(module, "check_model", lambda name: None)
    return module


@pytest.fixture
def run_search(search_module, tmp_path, monkeypatch, capsys):
    """Return a function that runs examples/search.py in this process and returns its output."""

    def run(*arguments):
        command = ["search.py", *map(str, arguments), "--store", str(tmp_path / "store")]
        monkeypatch.setattr(sys, "argv", command)
        search_module.main()
        return capsys.readouterr().out

    return run


def test_search_adds_all_files_also_to_an_empty_store(run_search, tmp_path):
    """`add` reads every file, and adds to a store whose rows were all deleted.

    `--top` may be larger than the minimum number of candidates.
    """
    paths = []
    for part in range(2):
        path = tmp_path / f"{part}.jsonl"
        rows = [{"id": 100 * part + row, "text": f"a bed {row}"} for row in range(100)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)

    assert "200 rows read; the store has 200" in run_search("add", *paths)
    for by in ("both", "meaning", "words"):
        assert len(ids(run_search("find", "bed", "--by", by, "--top", 150))) == 150

    assert "200 rows deleted" in run_search("delete", "--where", "id >= 0")
    assert ids(run_search("find", "bed")) == []
    assert "100 rows read; the store has 100" in run_search("add", paths[0])

    # An error in the second file leaves the store unchanged.
    paths[0].write_text('{"id": "x", "text": "a"}\n')
    with pytest.raises(UserError, match="0.jsonl, row 1: `id` must be an integer of 64 bits"):
        run_search("add", paths[1], paths[0])
    assert len(ids(run_search("find", "bed", "--top", 300))) == 100


def test_search_refuses_quantized_embeddings(run_search, tmp_path):
    """The search needs floating-point embeddings, and computes the signs itself."""
    embedding = np.array([3, 200], np.uint8)
    frame = pandas.DataFrame({"id": [1], "text": ["a"], "embedding": [embedding]})
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="must be floating-point numbers, got uint8"):
        run_search("add", tmp_path / "a.parquet")


def test_search_replaces_all_columns_of_a_row(search_module, run_search, tmp_path):
    """A replaced row has null in the columns that its file does not have."""
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "old", "kind": "noun", "year": 1990}\n')
    (tmp_path / "b.jsonl").write_text('{"year": 7.0, "text": "new", "id": 1}\n')
    run_search("add", tmp_path / "a.jsonl")
    run_search("add", tmp_path / "b.jsonl")

    table = search_module.lancedb.connect(tmp_path / "store").open_table("texts").to_arrow()
    (row,) = table.select(["id", "text", "kind", "year"]).to_pylist()
    assert row == {"id": 1, "text": "new", "kind": None, "year": 7}


def test_search_refuses_other_columns_before_it_adds_a_file(run_search, tmp_path):
    """A column or type that the store does not have is an error, and no file is added."""
    good, new_column, new_type = (tmp_path / f"{name}.jsonl" for name in "abc")
    good.write_text('{"id": 1, "text": "a", "year": 1990}\n')
    new_column.write_text('{"id": 2, "text": "b", "kind": "noun"}\n')
    new_type.write_text('{"id": 3, "text": "c", "year": "late"}\n')
    for path, message in (
        (new_column, r"b.jsonl must have columns of the store \(id, .*got kind. Remove them"),
        (new_type, "c.jsonl: `year` must have the type int64 of the store"),
    ):
        # The first file determines the columns of a new store.
        with pytest.raises(UserError, match=message):
            run_search("add", good, path)
        assert not (tmp_path / "store" / "texts.lance").exists()

    run_search("add", good)
    with pytest.raises(UserError, match="b.jsonl must have columns of the store"):
        run_search("add", good, new_column)


@pytest.mark.parametrize("column", ["bits", "_distance", "_score"])
def test_search_refuses_reserved_columns(search_module, tmp_path, column):
    (tmp_path / "a.csv").write_text(f"id,text,{column}\n1,a,2\n")
    with pytest.raises(UserError, match=f"a.csv must not have a column '{column}'.* Rename it."):
        search_module.read_rows(str(tmp_path / "a.csv"), "model", None)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.csv", "id,text\n7,null\n8,NA\n9,\n", [(7, "null"), (8, "NA"), (9, "")]),
        ("a.csv", "id,text\n007,a\n7,b\n", [("007", "a"), ("7", "b")]),
        ("a.csv", "id,text\nNA,a\nnull,b\n", [("NA", "a"), ("null", "b")]),
        ("a.csv", f"id,text\n{2**63 + 5},a\n", [(str(2**63 + 5), "a")]),
        ("a.jsonl", f'{{"id": {2**63 + 5}, "text": "a"}}\n', [(str(2**63 + 5), "a")]),
        (
            "a.jsonl",
            f'{{"id": {2**53 + 1}, "text": "a"}}\n{{"id": 7.0, "text": "b"}}\n',
            [(2**53 + 1, "a"), (7, "b")],
        ),
        ("a.jsonl", '{"id": "7", "text": "a"}\n', [("7", "a")]),
        (
            "a.jsonl",
            '{"id": 7, "text": "a"}\n{"id": "b", "text": "b"}\n{"id": 7, "text": "c"}\n',
            [("b", "b"), ("7", "c")],
        ),
    ],
)
def test_search_keeps_ids_and_texts(search_module, tmp_path, name, content, expected):
    """IDs and texts are stored as in the file, and IDs are integers only if all of them are."""
    path = tmp_path / name
    path.write_text(content)
    table = search_module.read_rows(str(path), "model", None)
    assert list(zip(table["id"].to_pylist(), table["text"].to_pylist())) == expected


def test_search_keeps_missing_numbers_of_csv_files(search_module, tmp_path):
    """Empty cells of other columns are missing values, so that numbers stay numbers."""
    path = tmp_path / "a.csv"
    path.write_text("id,text,year\n1,a,1990\n2,b,\n")
    table = search_module.read_rows(str(path), "model", None)
    assert table["year"].to_pylist() == [1990, None]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"id": 7, "text": "a"}\n{"id": 7.6, "text": "b"}\n', "row 2: `id` .*7.6"),
        ("a.jsonl", '{"id": 7, "text": "a"}\n{"id": null, "text": "b"}\n', "row 2: `id` .*None"),
        ("a.jsonl", '{"id": true, "text": "a"}\n', "row 1: `id` .*True"),
        ("a.csv", "id,text\n7,a\n,b\n", "row 2: `id` .*''"),
        ("a.csv", "id,text\n", "contains no rows"),
        ("a.csv", "id,words\n1,a\n", "must have a column 'text'"),
    ],
)
def test_search_refuses_ids_and_files(search_module, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        search_module.read_rows(str(path), "model", None)


def test_search_refuses_parquet_rows_without_a_text(search_module, tmp_path):
    path = tmp_path / "a.parquet"
    pandas.DataFrame({"id": [1, 2], "text": ["a", None]}).to_parquet(path)
    with pytest.raises(UserError, match="row 2: `text` must be text"):
        search_module.read_rows(str(path), "model", None)


def test_search_compares_ids_with_an_integer_store(search_module, tmp_path):
    """Strings are integers of the store only if their digits are unchanged."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n7,a\n")
    integer = search_module.pa.int64()
    assert search_module.read_rows(str(path), "model", integer)["id"].to_pylist() == [7]
    path.write_text("id,text\n7,a\n007,b\n")
    with pytest.raises(UserError, match="row 2: `id` must be an integer of 64 bits.*'007'"):
        search_module.read_rows(str(path), "model", integer)


@pytest.mark.parametrize(
    "condition, reason",
    [
        ("year = 'late'", "could not convert to literal of type 'Int64'"),
        ("year =", "sql parser error"),
        ("author = 1999", "No field named author. Valid fields are .*year"),
        ('text = "a"', "No field named a. "),
        ("year", "does not return a boolean"),
        ("'", "Unterminated string literal"),
    ],
)
def test_search_names_the_condition_that_is_wrong(run_search, tmp_path, condition, reason):
    """An invalid `--where` is an error with the condition and the reason of the library."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "text": "a", "year": 1999}\n')
    run_search("add", path)
    message = (
        rf"`--where` must be a condition .*, got {re.escape(repr(condition))} \(.*{reason}.*\)\. "
        r"Write it as in SQL, with texts in single quotes: kind = 'noun'\.$"
    )
    for words in (["delete"], ["find", "a"], ["find", "a", "--by", "words"]):
        with pytest.raises(UserError, match=message) as caught:
            run_search(*words, "--where", condition)
        assert ".rs:" not in str(caught.value) and "\n" not in str(caught.value)
    assert "1 rows deleted" in run_search("delete", "--where", "year = 1999")


@pytest.mark.slow
def test_search(search, tmp_path):
    """Add, search, filter, replace and delete rows; the first two commands are separate processes.

    Rows are searched by embeddings (`--by meaning`), by words and by both. Another model than that
    of the store is an error.
    """
    store = tmp_path / "store"
    path = tmp_path / "rows.jsonl"
    lines = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    rows = [dict(zip(("word", "text"), line.split("\t"))) for line in lines[1200:1260]]
    rows = [{"id": i, **row, "short": len(row["text"]) < 60} for i, row in enumerate(rows)]
    rows.append({"id": "own", "text": "zyx number of a submarine", "word": "own", "short": True})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "the store has 61" in search(store, "add", path, in_process=False)

    # Search by embeddings, then by embeddings and words with a filter.
    hawk = "diurnal bird of prey typically having short rounded wings and a long tail"
    query = "a bird that hunts by day"
    printed = search(store, "find", query, hawk, "--by", "meaning", in_process=False)
    assert ids(printed)[3] == next(str(row["id"]) for row in rows if row["text"] == hawk)
    output = search(store, "find", "zyx of a ship", "--where", "short = true")
    assert ids(output)[0] == "own" and "found in" in output
    assert set(ids(output)) <= {str(row["id"]) for row in rows if row["short"]}

    # Replace a row and delete it.
    pandas.DataFrame([{**rows[-1], "text": "a wyv of iron"}]).to_csv(
        tmp_path / "a.csv", index=False
    )
    assert "the store has 61" in search(store, "add", tmp_path / "a.csv")
    assert ids(search(store, "find", "wyv", "zyx", "--by", "words")) == ["own"], (
        "The new row must replace the row with the same ID."
    )
    assert "1 rows deleted" in search(store, "delete", "--where", "id = 'own'")
    assert ids(search(store, "find", "wyv", "--by", "words")) == []

    # Integer IDs stay integers.
    integers = tmp_path / "integers"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    search(integers, "add", path)
    assert ids(search(integers, "find", "a bird", "--where", "id = 7")) == ["7"]
    assert "1 rows deleted" in search(integers, "delete", "--where", "id = 7")
    assert "`id` must be an integer" in search(integers, "add", tmp_path / "a.csv", code=2)

    # Errors are one sentence.
    for *arguments, sentence in (
        ("add", path, "--model", "other", "the model of the store, got other."),
        ("find", "wyv", "--model", "other", "the model of the store, got other."),
        ("find", "wyv", "--where", "kind = 'noun'", "No field named kind"),
        ("add", tmp_path / "none.jsonl", "none.jsonl"),
        ("add", ROOT / "README.md", "no file of rows at "),
        ("add", ROOT / "tests" / "data" / "names" / "test.jsonl", "there is no column 'id'"),
    ):
        assert sentence in search(store, *arguments, code=2), arguments


@pytest.mark.slow
def test_token_classification(model_folder, tmp_path):
    """The token classifier learns to tag colors and persons, which are 40 % of the tokens."""

    def row(generator):
        color, thing, name = map(generator.choice, (COLORS, THINGS, NAMES))
        tags = ["O", "COLOR", "O", "O", "PERSON"]
        return {"tokens": ["the", color, thing, "of", name], "tags": tags}

    metrics = run(
        "token_classification", tmp_path / "data", model_folder, tmp_path, row, epochs="2"
    )
    assert metrics["accuracy"] > 0.95 and metrics["baseline"] == pytest.approx(0.6)


@pytest.mark.slow
def test_question_answering(model_folder, tmp_path):
    """The model learns to extract a color from a context of different lengths."""

    def row(generator):
        color = generator.choice(COLORS)
        thing = generator.choice(THINGS)
        context = (
            f"{' '.join(generator.choices(THINGS, k=generator.randrange(4)))} a {color} {thing}"
        ).strip()
        return {
            "question": "which color?",
            "context": context,
            "answers": {"text": [color], "answer_start": [context.index(color)]},
        }

    metrics = run("question_answering", tmp_path / "data", model_folder, tmp_path, row)
    assert metrics["after"] > 0.8 > metrics["before"]


# ------------------------------------------------------------------------------------------------
# Examples as processes

# Program that runs the examples one after another, and writes a JSON file with the result of each
# `main`. For each loaded model, the file also contains the number of non-padding tokens, of tokens
# with padding, and of tokens that the model computed.
RUNNER = """
import functools, importlib.util, json, sys
import torch, transformers

torch.set_num_threads(1)
load, watched = transformers.PreTrainedModel.from_pretrained.__func__, []

{count_rows}
def watch(cls, *args, **kwargs):
    model = load(cls, *args, **kwargs)
    model, more = model if isinstance(model, tuple) else (model, None)
    seen = {{"code": type(model).__module__, "real": 0, "padded": 0, "computed": count_rows(model.base_model.layer_norm)}}
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        seen["real"] += int(kwargs["attention_mask"].sum())
        seen["padded"] += kwargs["attention_mask"].numel()
        return inner(*args, **kwargs)

    model.forward = forward
    watched.append(seen)
    return model if more is None else (model, more)

transformers.PreTrainedModel.from_pretrained = classmethod(watch)
results = {{}}
for path, argv in {runs!r}:
    spec = importlib.util.spec_from_file_location("example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    watched.clear()
    metrics = module.main(argv)
    results[path] = {{"metrics": metrics, "models": [{{**seen, "computed": sum(seen["computed"])}} for seen in watched]}}
with open({output!r}, "w") as file:
    json.dump(results, file)
"""  # noqa: E501


# Program that loads saved folders with the code that they contain, without importing this package.
LOADER = """
import sys
import sentence_transformers

for name, folder in {folders!r}:
    model = getattr(sentence_transformers, name)(folder, trust_remote_code=True)
    module = model.model if name == "CrossEncoder" else model[0].auto_model
    assert type(module).__module__.startswith("transformers_modules."), type(module)
assert not any(name.split(".")[0] == "neobert" for name in sys.modules), "the package was imported"
"""


def training_commands_of_page():
    """Return the commands of the training examples in docs/embeddings.md, and their output.

    Returns:
        ({name of an example: arguments}, output on the page).
    """
    page = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    block = re.search(
        r"```bash\n([^`]*examples/reranker\.py.*?)```\n```\n(.*?)```", page, re.DOTALL
    )
    commands = [shlex.split(line, comments=True) for line in block[1].splitlines()]
    return {Path(words[1]).stem: words[2:] for words in commands}, block[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the commands of docs/embeddings.md in a separate process and return their results.

    Returns:
        {name of an example: results}. The results are "metrics" (of its `main`), "models" (token
        counts of each loaded model), "folder" (of the output) and "printed" (the output of all
        examples).
    """
    commands, _ = training_commands_of_page()
    folder = tmp_path_factory.mktemp("examples")
    (folder / "runs").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    checkpoint, converted = commands.pop("convert_checkpoint")
    assert convert([str(folder / checkpoint), str(folder / converted)]) == 0
    paths = {name: str(ROOT / "examples" / f"{name}.py") for name in commands}
    runs = [(paths[name], arguments) for name, arguments in commands.items()]

    output = folder / "outcomes.json"
    runner = RUNNER.format(runs=runs, output=str(output), count_rows=inspect.getsource(count_rows))
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, "-c", runner], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-5000:]

    results = json.loads(output.read_text())
    return {
        name: {**results[paths[name]], "folder": folder / "runs" / name, "printed": process.stdout}
        for name in USES
    }


# Class of sentence_transformers that each example trains.
USES = {
    "reranker": "CrossEncoder",
    "sparse_encoder": "SparseEncoder",
    "late_interaction": "MultiVectorEncoder",
    "matryoshka": "SentenceTransformer",
}


@pytest.mark.slow
def test_saved_folders_load_with_their_own_code(outcomes, tmp_path):
    """Saved folders contain the modeling code and load in a process without this package."""
    for name in USES:
        folder = outcomes[name]["folder"]
        assert (folder / "modeling_neobert.py").is_file()
        config = json.loads((folder / "config.json").read_text())
        assert "modeling_neobert" in str(config["auto_map"])
        assert not list(folder.glob("checkpoint-*"))

    folders = [(class_name, str(outcomes[name]["folder"])) for name, class_name in USES.items()]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", LOADER.format(folders=folders)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_examples_do_not_process_padding(name, outcomes):
    """The last norm of the backbone receives only non-padding tokens in training and inference."""
    for phase, counts in zip(
        ("training", "inference"), (outcomes[name]["models"][0], outcomes[name]["models"][-1])
    ):
        assert counts["padded"] > 1.05 * counts["real"] > 0, (
            f"The batches of the {phase} must contain padding, or this test shows nothing."
        )
        assert counts["computed"] == counts["real"]


@pytest.mark.slow
def test_training_improves_metrics(outcomes):
    """A few steps on 256 definitions improve the metrics.

    The results are also far above those of a random order, which are 1/64 for recall@1 and 0.5 for
    the reranker.
    """
    metrics = {name: outcome["metrics"] for name, outcome in outcomes.items()}
    assert metrics["reranker"]["accuracy"] > max(0.6, metrics["reranker"]["before"]), metrics

    sparse = metrics["sparse_encoder"]
    assert sparse["after"] > max(2 / 64, sparse["before"]) and 1 < sparse["terms"] < 10_000

    late = metrics["late_interaction"]
    assert late["after"] > 10 / 64, metrics

    assert list(metrics["matryoshka"]) == ["384", "96", "24"]
    before, after = metrics["matryoshka"]["24"]
    assert after > max(10 / 64, before), metrics

    printed = outcomes["reranker"]["printed"]
    assert "learning rate: 3.0e-04 (hidden size 384)" in printed
    assert "pin_memory" not in printed


@pytest.mark.slow
def test_output_of_examples_is_current(outcomes):
    """docs/embeddings.md shows what its commands print."""
    _, shown = training_commands_of_page()
    printed = pages.shortened(outcomes["reranker"]["printed"], shown)
    assert pages.same(shown, printed), printed


def test_make_names_tags_wordnet_instances(tmp_path, monkeypatch):
    """examples/make_names.py tags the names of WordNet instances in WordNet glosses.

    The longest name is tagged. Names of two types are omitted, and so are synsets that are not
    instances.
    """
    module = example("make_names")
    (tmp_path / "data.noun").write_text(
        "  1 a comment\n"
        '001 18 n 02 Byron 0 Ada_Byron 0 001 @i 009 n 0000 | mathematician from New England; "an '
        'example"\n'
        "002 15 n 01 New_England 0 001 @i 009 n 0000 | a region of England near Lincoln\n"
        "003 15 n 01 England 0 001 @i 009 n 0000 | a division\n"
        "004 15 n 01 Lincoln 0 001 @i 009 n 0000 | a city\n"
        "005 18 n 01 Lincoln 0 001 @i 009 n 0000 | a president\n"
        "006 15 n 01 region 0 001 @ 009 n 0000 | not an instance\n"
    )

    names, sentences = module.read_names(tmp_path)
    assert names == {
        ("Byron",): "PER",
        ("Ada", "Byron"): "PER",
        ("New", "England"): "LOC",
        ("England",): "LOC",
    }
    assert module.tag(sentences[0], names, 2) == {
        "tokens": ["Ada", "Byron", ":", "mathematician", "from", "New", "England", "."],
        "tags": ["B-PER", "I-PER", "O", "O", "O", "B-LOC", "I-LOC", "O"],
    }
    assert len(sentences) == 5


@pytest.mark.slow
def test_quickstart_runs(bundled, tmp_path):
    """examples/quickstart.py runs in a folder with only the files that it needs."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(bundled)
    shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path / "examples")
    for name in ("messages.csv", "sentence-encoder"):
        (tmp_path / "examples" / name).symlink_to(ROOT / "examples" / name)

    process = subprocess.run(
        [sys.executable, "examples/quickstart.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    printed = process.stdout
    # The first document is the answer to the query, and the last messages are classified.
    assert printed.index("an eagle circles over the valley") < printed.index("she plays the violin")
    for topic in ("billing", "delivery", "technical"):
        assert f"'prediction': '{topic}'" in printed
