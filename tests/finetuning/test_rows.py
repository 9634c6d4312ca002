"""Test how `neobert finetune` infers the task from rows, encodes labels and splits the rows."""

import csv
import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from helpers.jsonl import write_jsonl

from neobert.common.errors import UserError
from neobert.finetuning.finetune_options import DataOptions
from neobert.finetuning.rows import read_rows
from neobert.finetuning.splits import read_splits, split_rows
from neobert.finetuning.text_tasks import Examples, TextTask


def read(tmp_path, rows, known_labels=None, **options):
    """Write rows to a file, and return their task and splits."""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    return read_splits(DataOptions(train=str(path), **options), known_labels)


def rows_with(labels, column="label", copies=10):
    """Return rows with different texts, `copies` of them per label."""
    return [
        {"text": f"text {index} of copy {copy}", column: label}
        for copy in range(copies)
        for index, label in enumerate(labels)
    ]


@pytest.mark.parametrize(
    ("labels", "name", "expected"),
    [
        (["b", "a"], "classification", ("a", "b")),
        # Numeric labels are sorted by value. Codes keep their zeros, and versions among words are
        # no numbers.
        ([10, 9, 1], "classification", ("1", "9", "10")),
        (["10", "9.0", "1", "1.0"], "classification", ("1", "9", "10")),
        (["007", "1.0"], "classification", ("1", "007")),
        (["1.0", "1", "old"], "classification", ("1", "1.0", "old")),
        ([["1.0"], ["1", "2"]], "multi-label", ("1", "2")),
        ([1.0, 2.0], "classification", ("1", "2")),
        ([True, False], "classification", ("False", "True")),
        ([0.5, 2], "regression", ()),
        (list(range(60)), "regression", ()),
        ([["x"], ["y", "x"], []], "multi-label", ("x", "y")),
        ([["x", None], ["y"]], "multi-label", ("x", "y")),
        ([[0], [0, 1]], "multi-label", ("0", "1")),
    ],
)
def test_the_task_is_inferred_from_the_labels(tmp_path, labels, name, expected):
    """Check the task and the class names for labels of several types."""
    task, splits = read(tmp_path, rows_with(labels))
    assert (task.name, task.labels) == (name, expected)
    if labels == [["x"], ["y", "x"], []]:
        assert {tuple(label) for label in splits.train.labels} == {(1, 0), (1, 1), (0, 0)}


def test_binary_label_columns_are_multi_label(tmp_path):
    """Several label columns of 0 and 1 are a multi-label task. Other values are an error."""
    rows = [{"comment": f"c {i}", "toxic": i % 2, "rude": int(i % 3 == 0)} for i in range(60)]
    options = {"text_column": ["comment"], "label_column": ["toxic", "rude"]}
    task, splits = read(tmp_path, rows, **options)
    assert (task.name, task.labels) == ("multi-label", ("toxic", "rude"))
    (first,) = [
        label for texts, label in zip(splits.train.texts, splits.train.labels) if texts == ("c 3",)
    ]
    assert first == [1.0, 1.0]

    rows[5]["rude"] = 7
    with pytest.raises(UserError, match="row 6: label columns must contain 0 and 1, got"):
        read(tmp_path / "other", rows, **options)


def test_tags_and_spans_are_token_classification(tmp_path):
    """Tags of words and spans of characters are converted to BIO tags; plain tags are kept."""
    tokens = [{"tokens": ["Ada", f"w{i}"], "tags": ["S-PER", "O"]} for i in range(30)]
    task, splits = read(tmp_path, tokens)
    assert (task.name, task.labels, task.bio) == ("tokens", ("O", "B-PER", "I-PER"), True)
    assert splits.train.labels[0] == ["B-PER", "O"]
    assert splits.train.words[0][1][0] == 4

    spans = [
        {"text": f"Ada {i}", "entities": [{"start": 0, "end": 3, "label": "PER"}] if i % 2 else []}
        for i in range(30)
    ]
    task, splits = read(tmp_path / "spans", spans)
    assert (task.name, task.labels) == ("tokens", ("O", "B-PER", "I-PER"))
    assert {tuple(tags) for tags in splits.train.labels} == {("B-PER", "O"), ("O", "O")}

    plain = [{"tokens": ["Ada", f"w{i}"], "tags": ["NOUN", "X"]} for i in range(30)]
    task, _ = read(tmp_path / "plain", plain)
    assert (task.labels, task.bio, task.metrics) == (("NOUN", "X"), False, ("word_accuracy",))

    spans[3]["entities"] = [{"start": 2, "end": 40, "label": "PER"}]
    with pytest.raises(UserError, match="row 4: a span must be inside the text"):
        read(tmp_path / "outside", spans)


def test_words_are_preferred_to_their_text(tmp_path):
    """Tags belong to the column of words, but a number of tokens is not a text."""
    words = [
        {"id": i, "text": f"Ada {i}", "tokens": ["Ada", str(i)], "ner_tags": ["B-PER", "O"]}
        for i in range(30)
    ]
    task, _ = read(tmp_path, words)
    assert (task.name, task.text_columns, task.has_spaces) == ("tokens", ("tokens",), False)

    counts = [{"text": f"text {i}", "tokens": 2, "tags": ["x", "y"]} for i in range(30)]
    task, _ = read(tmp_path / "counts", counts)
    assert (task.name, task.text_columns) == ("multi-label", ("text",))


@pytest.mark.parametrize("columns", [("tokens", "tags"), ("sentence", "labels")])
def test_words_and_tags_may_be_separated_by_spaces(tmp_path, columns):
    """The task is inferred if the columns are named tokens and tags; --task sets it otherwise."""
    text, label = columns
    rows = [{text: f"Ada w{i}", label: "B-PER O"} for i in range(30)]
    # A text of a single word does not change the task.
    rows.append({text: "rain", label: "O"})
    options = {} if text == "tokens" else {"task": "tokens"}
    task, splits = read(tmp_path, rows, **options)
    assert (task.name, task.labels, task.has_spaces) == ("tokens", ("O", "B-PER", "I-PER"), True)
    assert splits.train.labels[0] == ["B-PER", "O"]

    # Single words with single labels, or with labels of another number, are classified.
    single = [{text: f"w{i}", label: "ab"[i % 2]} for i in range(30)]
    assert read(tmp_path / "single", single)[0].name == "classification"
    rows[5][label] = "B-PER O O"
    assert read(tmp_path / "other", rows)[0].name == "classification"


def test_a_csv_may_contain_lists(tmp_path):
    """A list in JSON in a cell of a CSV file is a list of labels."""
    lines = ["text,labels", *(f'text {i},"[""a"", ""b""]"' for i in range(30)), "other,[]"]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    task, _ = read_splits(DataOptions(train=str(tmp_path / "rows.csv")))
    assert (task.name, task.labels) == ("multi-label", ("a", "b"))


def test_a_csv_may_contain_words_and_tags(tmp_path):
    """Lists in JSON, as `neobert predict` writes them, are not split at spaces."""
    row = '"[""John"", ""New York""]","[""B-PER"", ""O""]"'
    lines = ["text,labels", *(row.replace("John", f"John{i}") for i in range(30))]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    task, splits = read_splits(DataOptions(train=str(tmp_path / "rows.csv")))
    assert (task.name, task.labels) == ("tokens", ("O", "B-PER", "I-PER"))
    (text,) = splits.train.texts[0]
    words = [text[start:end] for start, end in splits.train.words[0]]
    assert words[0].startswith("John") and words[1:] == ["New York"]
    assert splits.train.labels[0] == ["B-PER", "O"]


def read_csv(tmp_path, rows, **options):
    """Write rows to a CSV file without changing their cells, and return their task and splits."""
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return read_splits(DataOptions(train=str(path), **options))


def test_a_csv_may_contain_lists_of_pandas(tmp_path):
    """Lists that `DataFrame.to_csv` writes in the syntax of Python are parsed."""
    tagged = [
        {"tokens": str([f"Ada{i}", "isn't", "New York"]), "tags": str(["B-PER", "O", "B-LOC"])}
        for i in range(30)
    ]
    task, splits = read_csv(tmp_path, tagged)
    assert (task.name, task.has_spaces) == ("tokens", False)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    (text,) = splits.train.texts[0]
    words = [text[start:end] for start, end in splits.train.words[0]]
    assert words[1:] == ["isn't", "New York"]
    assert splits.train.labels[0] == ["B-PER", "O", "B-LOC"]

    labels = [["a"], ["b", "a"], [], [2]]
    rows = [{"text": f"text {i}", "topics": str(labels[i % 4])} for i in range(40)]
    task, _ = read_csv(tmp_path, rows, label_column=["topics"])
    assert (task.name, task.labels) == ("multi-label", ("2", "a", "b"))


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        # numpy writes arrays without commas, which Python would read as one string.
        ({"tokens": "['Ada' 'saw']", "tags": "['B-PER' 'O']"}, {}),
        ({"tokens": '["Ada", "saw"]', "tags": "['B-PER' 'O']"}, {}),
        ({"tokens": "['Ada' 'saw']", "tags": '["B-PER", "O"]'}, {}),
        ({"words": "['Ada' 'saw']", "labels": '["B-PER", "O"]'}, {"text_column": ["words"]}),
        ({"text": "Ada saw", "tags": "[B-PER, O]"}, {}),
        ({"text": "Ada saw", "tags": "[B-PER, O]"}, {"task": "tokens"}),
        ({"text": "Ada saw", "entities": "[{'start': 0, 'end': 3, 'label': 'PER'}]"}, {}),
        ({"text": "Ada saw", "topic": "['a' 'b']"}, {"label_column": ["topic"]}),
        ({"text": "Ada saw", "labels": "[a, b]"}, {"task": "multi-label"}),
    ],
)
def test_lists_that_cannot_be_parsed_are_reported(tmp_path, cells, options):
    """A cell with the brackets of a list must be a list in JSON, or one that pandas writes."""
    if "words" in cells:
        options = {**options, "task": "tokens"}
    with pytest.raises(UserError, match="labeled row 1: a list must be in JSON, got .*Write lists"):
        read_csv(tmp_path, [cells] * 30, **options)


def test_class_names_and_words_may_have_brackets(tmp_path):
    """A class name may have brackets, and so may a text whose words are separated by spaces."""
    rows = [{"text": f"text {i}", "label": ("[POS]", "[NEG]")[i % 2]} for i in range(40)]
    assert read_csv(tmp_path, rows)[0].labels == ("[NEG]", "[POS]")

    rows = [{"text": f"text {i}", "tags": ("['a' 'b']", "[x]")[i % 2]} for i in range(40)]
    task, _ = read_csv(tmp_path, rows, task="classification")
    assert task.labels == ("['a' 'b']", "[x]")

    rows = [{"tokens": f"[ Ada{i} ]", "tags": "O B-PER O"} for i in range(30)]
    task, splits = read_csv(tmp_path, rows)
    assert task.name == "tokens" and splits.train.labels[0] == ["O", "B-PER", "O"]

    # Lists of some rows show that a value with brackets is not a class name.
    rows = [{"text": f"text {i}", "labels": ('["a"]', '["b"]')[i % 2]} for i in range(30)]
    rows[7]["labels"] = "[c]"
    with pytest.raises(UserError, match="labeled row 8: a list must be in JSON, got"):
        read_csv(tmp_path, rows)


def test_numbers_with_decimals_are_different_classes(tmp_path):
    """Codes such as 250.1 and 250.10 are different class names; only 3.0 has the name 3."""
    rows = rows_with(["250.1", "250.10", "250.2", "3.0"])
    task, _ = read(tmp_path, rows, task="classification")
    assert task.labels == ("3", "250.1", "250.10", "250.2")


CLASS_NAMES = {"names": ["sad", "glad"], "_type": "ClassLabel"}


def read_parquet(tmp_path, texts, labels, column="label", is_list=False, feature=None):
    """Read a parquet file as `datasets` writes it.

    Args:
        tmp_path: Directory of the file.
        texts: Texts, or lists of words.
        labels: Values of the label column.
        column: Name of the label column.
        is_list: Whether a label is a list.
        feature: Description of the label column; by default the class names "sad" and "glad".
    """
    feature = feature or ({"feature": CLASS_NAMES} if is_list else CLASS_NAMES)
    features = {column: feature, "text": {"dtype": "string"}}
    table = pyarrow.table({"text": texts, column: labels})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "rows.parquet")
    return read_splits(DataOptions(train=str(tmp_path / "rows.parquet")))


def test_class_names_of_a_parquet_file_are_kept(tmp_path):
    """The class names that `datasets` stores in a parquet file name the label numbers."""
    task, splits = read_parquet(tmp_path, [f"t {i}" for i in range(40)], [0, 1] * 20)
    assert task.labels == ("sad", "glad")
    assert splits.train.labels[0] == 0


@pytest.mark.parametrize(
    "feature",
    [
        [CLASS_NAMES],
        {"feature": CLASS_NAMES, "_type": "Sequence"},
        {"feature": CLASS_NAMES, "_type": "List"},
    ],
)
def test_class_names_of_tags_are_kept(tmp_path, feature):
    """The names of tags are read from the files of all versions of `datasets`.

    Versions 2 and 3 describe a list of class labels by a list, and later ones by a mapping.
    """
    texts = [["a", str(i)] for i in range(40)]
    labels = [[0, 1], [1, 1]] * 20
    task, splits = read_parquet(tmp_path, texts, labels, "tags", feature=feature)
    assert (task.name, task.labels, task.bio) == ("tokens", ("glad", "sad"), False)
    assert {tuple(tags) for tags in splits.train.labels} == {("sad", "glad"), ("glad", "glad")}


# Description of a span, with an additional field whose name is a key of class labels.
SPAN = {
    "start": {"dtype": "int64", "_type": "Value"},
    "end": {"dtype": "int64", "_type": "Value"},
    "label": {"dtype": "string", "_type": "Value"},
    "names": {"dtype": "string", "_type": "Value"},
}


@pytest.mark.parametrize("feature", [[SPAN], {"feature": SPAN, "_type": "List"}])
def test_spans_of_a_parquet_file_are_read(tmp_path, feature):
    """A list of spans has no class names, even if a span has a field `names`."""
    span = {"start": 0, "end": 3, "label": "PER", "names": "Ada"}
    texts = [f"Ada {i}" for i in range(40)]
    task, splits = read_parquet(tmp_path, texts, [[span], []] * 20, "entities", feature=feature)
    assert (task.name, task.labels) == ("tokens", ("O", "B-PER", "I-PER"))
    assert {tuple(tags) for tags in splits.train.labels} == {("B-PER", "O"), ("O", "O")}
    assert read_rows(str(tmp_path / "rows.parquet"), ["text"], ["entities"]).names == ()


def test_a_negative_class_number_is_a_missing_label(tmp_path, caplog):
    """Rows with the class number -1, which `datasets` stores for a missing label, are left out."""
    caplog.set_level("INFO", "neobert")
    task, splits = read_parquet(tmp_path, [f"t {i}" for i in range(43)], [0, 1] * 20 + [-1] * 3)
    assert task.labels == ("sad", "glad") and sum(splits.sizes().values()) == 40
    assert "3 rows without a text or a label are left out" in caplog.text


@pytest.mark.parametrize("number", [-100, -1, 2])
@pytest.mark.parametrize("column", ["label", "labels", "tags"])
def test_class_numbers_out_of_range_are_reported(tmp_path, column, number):
    """A class number without a name is an error; a negative number only in a list."""
    if column == "label":
        texts, labels = [f"t {i}" for i in range(21)], [0, 1] * 10 + [2]
    else:
        texts, labels = ["a b"] * 21, [[0, 1]] * 20 + [[0, number]]
    if column == "tags":
        texts = [text.split() for text in texts]
    rule = "labeled row 21: a label must be from 0 to 1, because the file names its labels, got "
    with pytest.raises(UserError, match=rule):
        read_parquet(tmp_path, texts, labels, column, is_list=column != "label")


def test_lone_surrogates_are_replaced(tmp_path):
    """One half of a surrogate pair, which no tokenizer can encode, becomes U+FFFD."""
    spans = [{"start": 0, "end": 1, "label": "\ud83d"}]
    rows = {
        "labels": [{"text": f"\ud83d {i}", "label": "a\ud83d"[i % 2]} for i in range(20)],
        "tags": [{"tokens": ["\ud83d", str(i)], "tags": ["B-\ud83d", "O"]} for i in range(20)],
        "spans": [{"text": f"\ud83d {i}", "spans": spans} for i in range(20)],
    }
    for name, content in rows.items():
        task, splits = read(tmp_path / name, content)
        assert {text[:2] for (text,) in splits.train.texts} == {"\ufffd "}
        assert {label[-1] for label in task.labels} == {"\ufffd", "a" if name == "labels" else "O"}


def test_label_numbers_of_the_model_are_kept(tmp_path):
    """The label numbers of the model are kept if the file has the same labels, else replaced."""
    known_labels = {"b": 0, "a": 1}
    task, splits = read(tmp_path, rows_with(["a", "b"]), known_labels)
    assert task.labels == ("b", "a") and splits.train.labels[0] == 1
    task, _ = read(tmp_path / "other", rows_with(["a", "c"]), known_labels)
    assert task.labels == ("a", "c")

    tokens = [{"tokens": ["Ada", f"w{i}"], "tags": ["B-PER", "O"]} for i in range(30)]
    task, _ = read(tmp_path / "tags", tokens, {"I-PER": 0, "B-PER": 1, "O": 2})
    assert task.labels == ("I-PER", "B-PER", "O")


def test_rows_without_text_or_label_are_left_out(tmp_path, caplog):
    """Rows without a text or a label are omitted, and their number is logged."""
    caplog.set_level("INFO", "neobert")
    rows = [*rows_with(["a", "b"]), {"text": " ", "label": "a"}, {"text": "x", "label": None}]
    _, splits = read(tmp_path, rows)
    assert sum(splits.sizes().values()) == 20
    assert "2 rows without a text or a label are left out" in caplog.text


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"x": 1}], {}, "has no column text or sentence or tokens; it has x. Pass --text-column."),
        ([{"text;label": "a;x"}], {}, "by commas instead of ';', or by tabs"),
        (rows_with(["a", "b"]), {"text_column": ["text"] * 2}, "different columns, got text, text"),
        ([{"text": "a", "label": 10**400}] * 9, {"task": "regression"}, "must be a number, got"),
        ([{"text": "a", " label": "x"}], {}, "it has text, ' label'. Pass --label-column."),
        ([{"text": "a", "y": 1}], {"label_column": ["z"]}, "has no column 'z'; it has text, y."),
        ([{"text": "a", "label": "x"}] * 30, {}, "must have at least two labels, got x"),
        (rows_with([["x"], []]), {}, "two labels, got x. Use a column with two values, such as"),
        ([{"text": 3, "label": "x"}], {}, "row 1: a text must be a string, got 3"),
        ([{"text": "a", "label": "x"}] * 9, {"task": "regression"}, "must be a number, got"),
        ([{"text": "a", "label": "x"}], {"text_column": ["label"]}, "must be different columns"),
        (rows_with(["a", "b"], copies=2), {}, "got 0. .* Labels of fewer than 3 texts stay"),
        (rows_with([[1, 0], [0, 1]]), {}, "not a 0 or 1 per label, got .1, 0.. Write the names"),
        (rows_with([[]], "spans"), {}, "at least one label or span, got empty lists in all rows"),
        (rows_with([[]], "spans"), {"task": "tokens"}, "must contain an entity, got none"),
        (
            rows_with([*range(60), "N/A"], copies=1),
            {},
            'row 61: the label of a regression must be a number, got "N/A". .* --task regression',
        ),
    ],
)
def test_unusable_rows_are_reported(tmp_path, rows, options, message):
    """Check the messages about rows that cannot be used."""
    with pytest.raises(UserError, match=message):
        read(tmp_path, rows, **options)


# ------------------------------------------------------------------------------------------------
# splits


def examples(labels):
    """Return rows with different texts and these labels."""
    return Examples([(f"text {i}",) for i in range(len(labels))], labels, [])


def test_splits_are_stratified_disjoint_and_seeded():
    """Each part has the same distribution of labels, and the seed determines the parts."""
    labels = [0] * 700 + [1] * 200 + [2] * 100
    task = TextTask("classification", ("text",), ("label",), ("a", "b", "c"))
    parts = split_rows(task, examples(labels), [0.1, 0.2], seed=0)

    # Each row is in exactly one part, and each part has its fraction of every label.
    assert sorted(index for part in parts for index in part) == list(range(1000))
    for part, fraction in zip(parts, (0.7, 0.1, 0.2)):
        counts = Counter(labels[index] for index in part)
        for label, total in ((0, 700), (1, 200), (2, 100)):
            assert abs(counts[label] - fraction * total) <= 2, (
                f"Unexpected counts {counts} of the part with fraction {fraction}."
            )

    assert split_rows(task, examples(labels), [0.1, 0.2], seed=0) == parts
    assert split_rows(task, examples(labels), [0.1, 0.2], seed=1) != parts

    # The rows of a label are a random sample, not the first or the last rows.
    first = [index for index in parts[2] if index < 700]
    assert 40 < sum(index < 350 for index in first) < 100


def test_splits_of_equal_texts_and_rare_labels():
    """Rows with equal texts are in the same part, and labels of two rows are in the training part.

    Equal texts in two parts would leak training rows into the validation or test rows.
    """
    task = TextTask("classification", ("text",), ("label",), ("a", "b"))
    rare = [(f"rare {i}",) for i in range(40)]
    texts = [(f"text {i // 4}",) for i in range(200)] + rare
    labels = [0] * 200 + [1 + i // 2 for i in range(40)]
    parts = split_rows(task, Examples(texts, labels, []), [0.2, 0.2], seed=0)
    sets = [{texts[index] for index in part} for part in parts]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    assert sets[1] and sets[2] and set(rare) <= sets[0]


def test_copies_with_other_capital_letters_stay_in_one_part(tmp_path, caplog):
    """Texts that an uncased model cannot distinguish are in the same part, or are reported."""
    task = TextTask("classification", ("text",), ("label",), ("a", "b"))
    texts = [(text,) for i in range(100) for text in (f"where is {i}?", f"Where is  {i}? ")]
    parts = split_rows(task, Examples(texts, [0, 1] * 100, []), [0.2, 0.2], seed=0)
    assert all(parts)
    for part in parts:
        assert {index ^ 1 for index in part} == set(part)

    for name, text in (("train", "An eagle"), ("test", " an  eagle")):
        rows = [{"text": f"{name} {i}", "label": "ab"[i % 2]} for i in range(8)]
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text, "label": "a"}, *rows])
    read_splits(
        DataOptions(train=str(tmp_path / "train.jsonl"), test_file=str(tmp_path / "test.jsonl"))
    )
    assert "1 of 9 test texts also occur in the train" in caplog.text


@pytest.mark.parametrize(
    ("labels", "listed"),
    [
        (["Yes", "no", "yes"], "'Yes', 'yes'"),
        (["no", "yes", "yes "], "'yes', 'yes '"),
        ([True, 1, "x"], "'1', 'True'"),
        (["yes", "no", "y"], None),
    ],
)
def test_labels_with_several_spellings_are_reported(tmp_path, caplog, labels, listed):
    """A warning names labels that are probably one class but are typed in several ways."""
    task, _ = read(tmp_path, rows_with(labels))
    assert len(task.labels) == 3
    messages = [message for message in caplog.messages if "spellings of one class" in message]
    assert [message.split(" look")[0] for message in messages] == (
        [f"The labels {listed}"] if listed else []
    )


def test_empty_test_file_is_refused(tmp_path):
    """A test file with a header only is an error about its rows."""
    test = tmp_path / "test.csv"
    test.write_text("text,label\n")
    with pytest.raises(UserError, match="test.csv must contain at least one row, got none"):
        read(tmp_path, rows_with(["a", "b"]), test_file=str(test))


def test_test_file_replaces_the_test_split(tmp_path, caplog):
    """With a test file, no training rows are used for the test.

    A label that only the test file contains is part of the task, and is reported.
    """
    test = tmp_path / "test.jsonl"
    write_jsonl(test, [{"text": "text 0 of copy 0", "label": "a"}, {"text": "new", "label": "c"}])
    task, splits = read(tmp_path, rows_with(["a", "b"]), test_file=str(test))
    assert splits.sizes()["test"] == 2 and splits.sizes()["train"] in (17, 18)
    assert task.labels == ("a", "b", "c")
    assert "There are no training rows of the labels c" in caplog.text


def test_texts_of_two_parts_are_reported(tmp_path, caplog):
    """Each pair of parts with common texts has a warning."""
    caplog.set_level("WARNING", "neobert")
    rows = rows_with(["a", "b"], copies=2)
    path = tmp_path / "part.jsonl"
    write_jsonl(path, rows)
    read(tmp_path, rows, validation_file=str(path), test_file=str(path))
    ending = "metrics are too high."
    assert caplog.messages == [
        f"4 of 4 validation texts also occur in the training rows, so the validation {ending}",
        f"4 of 4 test texts also occur in the training rows, so the test {ending}",
        f"4 of 4 test texts also occur in the validation rows, so the test {ending}",
    ]

    # The parts of one file have no texts in common.
    caplog.clear()
    read(tmp_path, rows_with(["a", "b"]))
    assert not caplog.messages
