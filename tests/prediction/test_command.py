"""Test `neobert predict`: predictions, entities, windows, file formats and resumed runs.

Predictions are compared with those of transformers pipelines and models, and with formulas.
"""

import csv
import io
import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import finetune_runs as runs
from helpers.hub_cache import add_to_cache
from helpers.jsonl import write_jsonl
from helpers.paths import ROOT
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from neobert import NeoBERTConfig, NeoBERTForSequenceClassification, NeoBERTForTokenClassification
from neobert.cli import main
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.embeddings.windows import text_windows
from neobert.finetuning.tagging import join_words
from neobert.prediction import classifier, command
from neobert.prediction.classifier import PackedClassifier, TaskRecord
from neobert.prediction.command import predict
from neobert.prediction.options import OPTIONS


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LABELS = ["bad", "fair", "good"]
TEXTS = [f"the {word} film number {n} {'is long ' * (n % 5)}" for n, word in enumerate(LABELS * 8)]


def write_classifier(folder, model_class=NeoBERTForSequenceClassification, **settings):
    """Write a classifier with random weights whose logits are far apart, and return its path."""
    torch.manual_seed(0)
    names = settings.pop("labels", LABELS)
    settings = {**SIZES, "embedding_init_range": 0.3, "classifier_init_range": 1.0, **settings}
    config = NeoBERTConfig(**settings)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.num_labels = len(names)
    model_class(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(folder)
    return folder


def write_task(folder, **values):
    """Write the task.json of a model that `neobert finetune` has saved."""
    record = {
        "task": "classification",
        "text_columns": ["text"],
        "labels": LABELS,
        "bio": False,
        "max_length": 64,
        "temperature": 1.0,
        "version": "0",
    }
    (folder / "task.json").write_text(json.dumps({**record, **values}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the path of a classifier with three labels and temperature 2.5."""
    folder = write_classifier(tmp_path_factory.mktemp("model"))
    write_task(folder, temperature=2.5)
    return folder


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    """Return the path of a token classifier with the entity types X and Y."""
    folder = tmp_path_factory.mktemp("tagger")
    names = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    write_classifier(folder, NeoBERTForTokenClassification, labels=names)
    write_task(folder, task="tokens", labels=names, bio=True)
    return folder


def run(tmp_path, rows, model, *arguments, output="out.jsonl"):
    """Predict rows, and return the rows of the output and the summary.

    The input file is written in the first call only. Later calls in the same directory read it
    again, and ignore `rows`.
    """
    source = tmp_path / "rows.jsonl"
    if not source.exists():
        write_jsonl(source, rows)
    command_line = [source, tmp_path / output, "--model", model, *arguments]
    summary = predict(
        OPTIONS["predict"].read([str(part) for part in command_line]), progress_bar=False
    )
    return read(tmp_path / output), summary


def read(path):
    """Return the rows of a parquet, CSV or JSON Lines file."""
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return [json.loads(line) for line in text.splitlines()]


def rows_of(texts):
    """Return rows with an id and a text."""
    return [{"id": f"r{number}", "text": text} for number, text in enumerate(texts)]


def logits_of(model, *texts):
    """Return the logits of a text or a pair of texts, computed by transformers."""
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        return classifier(**tokenizer(*texts, return_tensors="pt")).logits[0].numpy()


# ------------------------------------------------------------------------------------------------
# labels and probabilities


def test_probabilities_match_pipeline_with_temperature(tmp_path, model):
    """Probabilities are the softmax of the pipeline's logits divided by the temperature."""
    predictions, summary = run(
        tmp_path, rows_of(TEXTS), model, "--probabilities", "--batch-tokens", "50"
    )
    classifier = pipeline("text-classification", str(model), top_k=None, function_to_apply="none")
    for row, text, outputs in zip(predictions, TEXTS, classifier(TEXTS)):
        logits = {output["label"]: output["score"] / 2.5 for output in outputs}
        total = sum(np.exp(value) for value in logits.values())
        for label, value in logits.items():
            assert row[f"probability_{label}"] == pytest.approx(np.exp(value) / total, abs=2e-5)
        assert row["prediction"] == max(logits, key=logits.get)
        assert row["probability"] == row[f"probability_{row['prediction']}"]
        assert (row["text"], list(row)[:2]) == (text, ["id", "text"])

    assert len({row["probability"] for row in predictions}) > 10
    assert (summary.rows, summary.missing, summary.truncation.texts) == (24, 0, 0)


def test_task_json_of_a_hub_model_is_read(tmp_path, model, monkeypatch):
    """A model on the Hub has the temperature and the maximum length of its task.json."""
    add_to_cache(monkeypatch, tmp_path / "hub", model, "user/model")
    expected, _ = run(tmp_path, rows_of(TEXTS), model, output="local.jsonl")
    predictions, _ = run(tmp_path, [], "user/model")
    assert predictions == expected


def test_damaged_task_json_is_refused(tmp_path):
    """A task.json that was edited by hand is reported with its path and the remedy."""
    folder = write_classifier(tmp_path / "model")
    write_task(folder, max_length="64")
    message = r"task.json does not .* \(Expected `int`, got `str` - at .*\). Restore the"
    with pytest.raises(UserError, match=message):
        run(tmp_path, rows_of(TEXTS), folder)
    assert not (tmp_path / "out.jsonl").exists()


def test_hub_model_without_task_json(tmp_path, monkeypatch):
    """Offline, a classifier in the cache without a task.json has the labels of its config.json."""
    folder = write_classifier(tmp_path / "model")
    add_to_cache(monkeypatch, tmp_path / "hub", folder, "user/model")
    expected, _ = run(tmp_path, rows_of(TEXTS), folder, output="local.jsonl")
    predictions, _ = run(tmp_path, [], "user/model")
    assert predictions == expected
    with pytest.raises(UserError, match="user/other cannot be loaded"):
        run(tmp_path, [], "user/other", output="other.jsonl")


def test_multi_label_and_regression(tmp_path):
    """Check the predictions of a multi-label model and of a regression model."""
    folder = write_classifier(tmp_path / "many", problem_type="multi_label_classification")
    write_task(folder, task="multi-label", temperature=0.5)
    predictions, _ = run(tmp_path, rows_of(TEXTS), folder, "--probabilities")
    for row in predictions:
        probabilities = 1 / (1 + np.exp(-logits_of(folder, row["text"]) / 0.5))
        assert [row[f"probability_{label}"] for label in LABELS] == pytest.approx(
            probabilities, abs=2e-5
        )
        expected = [label for label, value in zip(LABELS, probabilities) if value > 0.5]
        assert row["prediction"] == expected and len(row["probability"]) == len(expected)

    folder = write_classifier(tmp_path / "value", labels=["value"], problem_type="regression")
    predictions, _ = run(tmp_path, [], folder, output="values.jsonl")
    values = [row["prediction"] for row in predictions]
    assert values == pytest.approx([logits_of(folder, text)[0] for text in TEXTS], abs=2e-5)


def test_values_of_a_regression_keep_their_digits(tmp_path):
    """Small values are not rounded to 0, and a value has no more digits than a float32."""
    folder = write_classifier(tmp_path / "value", labels=["value"], problem_type="regression")
    options = OPTIONS["predict"].read(["in.jsonl", "out.jsonl", "--model", str(folder)])
    packed = PackedClassifier(options, TaskRecord.from_model(str(folder)))
    logits = np.array([[3.04e-07], [0.1], [16777215]], np.float32).astype(np.float64)
    values = [row["prediction"] for row in packed._labels(logits, all_probabilities=False)]
    assert values == [3.04e-07, 0.1, 16777215]


def test_length_of_a_model_without_task_json(tmp_path):
    """Texts are truncated at the limit of the model, and at `max_length` of task.json if lower."""
    folder = write_classifier(tmp_path / "model", max_position_embeddings=1024)
    text = "the film " * 400 + "is bad"
    predictions, summary = run(tmp_path, rows_of([text]), folder)
    logits = np.exp(logits_of(folder, text))
    assert summary.truncation.texts == 0
    assert predictions[0]["probability"] == pytest.approx(logits.max() / logits.sum(), abs=2e-5)

    write_task(folder)
    _, summary = run(tmp_path, [], folder, output="short.jsonl")
    assert summary.truncation.texts == 1


def test_pairs(tmp_path, model):
    """A model of pairs reads two columns, and does not support windows."""
    folder = write_classifier(tmp_path / "pairs")
    write_task(folder, text_columns=["a", "b"])
    rows = [{"a": text, "b": other} for text, other in zip(TEXTS, reversed(TEXTS))]
    predictions, _ = run(tmp_path, rows, folder)
    best = [LABELS[int(logits_of(folder, row["a"], row["b"]).argmax())] for row in rows]
    assert [row["prediction"] for row in predictions] == best
    with pytest.raises(UserError, match="needs one text column, got a model of pairs"):
        run(tmp_path, [], folder, "--long-texts", "windows", output="windows.jsonl")

    # A column named text is not a pair.
    (tmp_path / "missing").mkdir()
    with pytest.raises(UserError, match="has no column 'b', only a, text. Name the text columns"):
        run(tmp_path / "missing", [{"a": "x", "text": "y"}], folder)


@pytest.mark.parametrize("labels", [LABELS, ["score"]])
def test_pairs_of_a_model_without_task_json(tmp_path, labels):
    """A classifier or reranker that was trained elsewhere takes one or two columns."""
    folder = write_classifier(tmp_path / "model", labels=labels)
    rows = [{"a": text, "b": other} for text, other in zip(TEXTS[:3], TEXTS[3:6])]
    pairs, _ = run(tmp_path, rows, folder, "--text-column", "a", "b", output="pairs.jsonl")
    texts, _ = run(tmp_path, rows, folder, "--text-column", "a", output="texts.jsonl")
    for predictions, names in ((pairs, "ab"), (texts, "a")):
        for row in predictions:
            logits = logits_of(folder, *(row[name] for name in names))
            expected = labels[int(logits.argmax())]
            # The score of a reranker is the sigmoid of its output, as in the pipeline.
            if len(labels) == 1:
                expected = pytest.approx(1 / (1 + np.exp(-logits[0])), abs=1e-5)
            assert row["prediction"] == expected

    with pytest.raises(UserError, match="must name 1 or 2 columns for this model, got 3"):
        run(tmp_path, rows, folder, "--text-column", "a", "b", "a", output="three.jsonl")


def test_number_of_text_columns_of_task_json(tmp_path, model):
    """A model of single texts takes one column."""
    with pytest.raises(UserError, match="`text_column` must name 1 column for this model, got 2"):
        run(tmp_path, [{"text": "x", "b": "y"}], model, "--text-column", "text", "b")


@pytest.mark.parametrize("task", ["regression", "tokens"])
def test_probabilities_without_labels_of_texts_are_refused(tmp_path, tagger, task):
    """`--probabilities` is an error for models without a probability of each label of a text."""
    folder = tagger
    if task == "regression":
        folder = write_classifier(tmp_path / "value", labels=["value"], problem_type="regression")
    with pytest.raises(UserError, match=f"`probabilities` requires .*, got a model for {task}."):
        run(tmp_path, rows_of(TEXTS), folder, "--probabilities")


def test_bert_predictions_match_transformers(tmp_path):
    """BERT, which does not support packed batches, has the predictions of transformers."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30522, **SIZES, initializer_range=0.5)
    config.id2label = dict(enumerate(LABELS))
    config.num_labels = 3
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(tmp_path / "bert")

    rows = [{"text": text, "b": text[::-1]} for text in TEXTS]
    predictions, _ = run(
        tmp_path, rows, tmp_path / "bert", "--probabilities", "--batch-tokens", "60"
    )
    for row, prediction in zip(rows, predictions, strict=True):
        logits = logits_of(tmp_path / "bert", row["text"])
        assert prediction["b"] == row["b"]
        assert prediction["prediction"] == LABELS[int(logits.argmax())]
        probabilities = [prediction[f"probability_{label}"] for label in LABELS]
        assert probabilities == pytest.approx(
            (np.exp(logits) / np.exp(logits).sum()).tolist(), abs=1e-4
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_low_precision_is_close(tmp_path, model, dtype):
    """Probabilities in bfloat16 and int8 are close to those in float32, but not equal."""
    exact, _ = run(tmp_path, rows_of(TEXTS), model, "--probabilities")
    predictions, _ = run(
        tmp_path, [], model, "--probabilities", "--dtype", dtype, output="low.jsonl"
    )
    assert predictions != exact
    for row, other in zip(predictions, exact):
        for label in LABELS:
            name = f"probability_{label}"
            assert row[name] == pytest.approx(other[name], abs=0.1)


@pytest.mark.parametrize("has_record", [True, False])
def test_regression_in_16_bits_is_refused(tmp_path, has_record):
    """A regression in bfloat16, which would round the values, is refused without an output.

    A model without task.json is a regression by its configuration.
    """
    folder = write_classifier(tmp_path / "value", labels=["value"], problem_type="regression")
    if has_record:
        write_task(folder, task="regression", labels=[])
    message = "`dtype` must be float32 or int8 for a regression, got bfloat16"
    with pytest.raises(UserError, match=message):
        run(tmp_path, rows_of(TEXTS), folder, "--dtype", "bfloat16")
    assert not (tmp_path / "out.jsonl").exists()

    # The same output can be written in another precision.
    predictions, _ = run(tmp_path, [], folder)
    assert len(predictions) == len(TEXTS)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "float16"])
def test_precision_of_a_regression(dtype):
    """The precisions that are refused would change values near 2,000 by at least 0.5."""
    if dtype in ("float32", "int8"):
        loading.check_regression_dtype(dtype)
        return
    # The largest rounding error is half the distance of neighboring values.
    values = torch.arange(1990, 2048, dtype=torch.float64) + 0.5
    assert (values - values.to(getattr(torch, dtype))).abs().max() >= 0.5
    with pytest.raises(UserError, match=f"got {dtype}"):
        loading.check_regression_dtype(dtype)


# ------------------------------------------------------------------------------------------------
# entities


def test_entities_match_tags_of_first_tokens(tmp_path, tagger):
    """Entities follow from the tags that the model predicts for the first token of each word."""
    from neobert.finetuning.tagging import find_entities, split_words

    predictions, _ = run(tmp_path, rows_of(TEXTS), tagger)
    model = NeoBERTForTokenClassification.from_pretrained(tagger).eval()
    tokenizer = AutoTokenizer.from_pretrained(tagger)
    count = 0
    for row in predictions:
        # No token of these texts spans several words, so each word starts with a token of its own.
        words = split_words(row["text"])
        encoded = tokenizer(row["text"], return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            labels = model(**encoded).logits[0].argmax(-1).tolist()
        starts = {start: label for (start, end), label in zip(offsets, labels) if end > start}
        tags = [model.config.id2label[starts[start]] for start, _ in words]
        expected = [(item.start, item.end, item.label) for item in find_entities(tags, words)]
        assert [(e["start"], e["end"], e["label"]) for e in row["prediction"]] == expected
        for entity in row["prediction"]:
            assert row["text"][entity["start"] : entity["end"]] == entity["text"]
            assert 0 < entity["probability"] <= 1
        count += len(expected)
    assert count > 10


def test_entities_of_other_schemes(tmp_path, monkeypatch):
    """The tags of BILOU form entities of several words, and are returned unchanged."""
    tags = ["B-X", "I-X", "L-X", "U-X", "O", "U-Y"]
    monkeypatch.setattr(classifier, "predicted_tags", lambda *arguments: tags)
    words = ["the", "old", "man", "Ada", "saw", "Rome"]
    folder = write_classifier(
        tmp_path / "bilou", NeoBERTForTokenClassification, labels=sorted({*tags})
    )
    ((row,), _) = run(tmp_path, [{"text": words}], folder)
    assert [(entity["text"], entity["label"]) for entity in row["prediction"]] == [
        ("the old man", "X"),
        ("Ada", "X"),
        ("Rome", "Y"),
    ]
    assert row["predicted_tags"] == tags


def test_words_separated_by_spaces_get_tags(tmp_path):
    """A model that was trained on such words splits texts in the same way."""
    names = ["O", "B-X", "I-X"]
    folder = write_classifier(tmp_path / "model", NeoBERTForTokenClassification, labels=names)
    settings = {"task": "tokens", "text_columns": ["tokens"], "labels": names, "bio": True}
    write_task(folder, **settings, has_spaces=True)
    text = "e-mail  from U.S. offices"
    # Unlike .jsonl, a parquet file has only the columns of its schema.
    ((row,), _) = run(tmp_path, [{"tokens": text}], folder, output="out.parquet")
    assert len(row["predicted_tags"]) == 4
    # The positions are those of the text, which may have several spaces in a row.
    assert all(text[e["start"] : e["end"]] == e["text"] for e in row["prediction"])

    (tmp_path / "lists").mkdir()
    ((words,), _) = run(tmp_path / "lists", [{"tokens": text.split()}], folder)
    assert words["predicted_tags"] == row["predicted_tags"]


def test_lists_of_words_get_tags(tmp_path, tagger):
    """A list of words has the entities of the joined text, and additionally one tag per word."""
    texts, _ = run(tmp_path, rows_of(["the good film"]), tagger)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": ["the", "good", "film"]}])
    predictions, _ = run(tmp_path, [], tagger, output="split.jsonl")
    assert predictions[0]["prediction"] == texts[0]["prediction"]
    assert len(predictions[0]["predicted_tags"]) == 3

    # A cell of a csv file contains the list in JSON.
    (tmp_path / "rows.csv").write_text('text\n"[""the"", ""good"", ""film""]"\n')
    arguments = [str(tmp_path / "rows.csv"), str(tmp_path / "csv.jsonl")]
    command.main([*arguments, "--model", str(tagger), "--dtype", "float32"])
    (row,) = map(json.loads, (tmp_path / "csv.jsonl").read_text().splitlines())
    assert row["predicted_tags"] == predictions[0]["predicted_tags"]


def test_missing_values_do_not_decide_whether_words_are_split(tmp_path, tagger):
    """The first row with a text decides whether the column contains lists of words."""
    words = ["the", "good", "film"]
    expected, _ = run(tmp_path, [{"text": words}], tagger, output="words.jsonl")
    write_jsonl(tmp_path / "rows.jsonl", [{"text": None}, {"text": []}, {"text": words}])
    predictions, _ = run(tmp_path, [], tagger)
    assert predictions[2] == expected[0]
    assert predictions[0]["predicted_tags"] is predictions[0]["prediction"] is None


@pytest.mark.parametrize("texts", [["plain", "[1]", '["a"]'], ["[1]", "plain", "[]"]])
def test_texts_that_look_like_lists_stay_texts(tmp_path, tagger, texts):
    """Texts with brackets are not parsed as lists of words in a column of texts."""
    predictions, summary = run(tmp_path, rows_of(texts), tagger)
    assert [row["text"] for row in predictions] == texts and summary.missing == 0
    assert all("predicted_tags" not in row for row in predictions)


def test_entity_positions_with_windows(tmp_path, tagger):
    """With windows, the words after the model's maximum length are tagged, too.

    Windows overlap, and each entity must be returned once, with its position in the text.
    """
    text = " ".join(f"word{n % 7} of town {n % 3}." for n in range(60))
    truncated, summary = run(tmp_path, rows_of([text]), tagger)
    assert summary.truncation.texts == 1 and "1 texts truncated by" in summary.describe()

    predictions, summary = run(
        tmp_path, [], tagger, "--long-texts", "windows", "--overlap", "20", output="all.jsonl"
    )
    assert summary.truncation.texts == 0
    entities = predictions[0]["prediction"]
    starts = [entity["start"] for entity in entities]
    assert starts == sorted(set(starts))
    assert max(starts) > len(text) / 2 > max(entity["end"] for entity in truncated[0]["prediction"])
    for before, after in zip(entities, entities[1:]):
        assert before["end"] <= after["start"]


def test_words_of_windows_match_brute_force(tagger):
    """Words of windows, and their tags, are those of a comparison of all words with all tokens."""
    generator = random.Random(0)
    # Words of one, several and more tokens than a window has, empty words, and words without a
    # token.
    usual = ["film", "zxqvkjw", "don't", "a.", "东京", "", "\x00", "house"]
    texts = [generator.choices(usual, k=count) for count in (0, 1, 90, 300, 150)]
    texts += [["\x00"], ["", ""], ["the", "a." * 100, "film", "is", "long"]]
    rows, words = zip(*(join_words(text) for text in texts))

    arguments = ["in.jsonl", "out.jsonl", "--model", str(tagger), "--long-texts", "windows"]
    options = OPTIONS["predict"].read([*arguments, "--overlap", "20"])
    classifier = PackedClassifier(options, TaskRecord.from_model(str(tagger)))
    batch = classifier.tokenize([(text,) for text in rows], words)
    windows = text_windows(
        classifier.tokenizer, 64, rows, "", classifier.windows, with_offsets=True
    )
    assert [ids.tolist() for ids in batch.ids] == [ids.tolist() for ids in windows.tokens]

    # {index of a word: index of its first token} of each window.
    expected = []
    for row, offsets in zip(windows.rows, windows.offsets):
        positions = {}
        for index, (start, end) in enumerate(words[row]):
            for position, (first, stop) in enumerate(offsets):
                if first < stop and stop > start and first < end:
                    positions[index] = position
                    break
        expected.append(positions)
    actual = [
        {span.first + index: p for index, p in enumerate(span.positions) if p >= 0}
        for span in batch.words
    ]
    assert actual == expected and len(expected) > 20
    # Only the words of the window are stored. Less than half of the tokens are in two windows.
    assert sum(len(span.positions) for span in batch.words) < 2 * sum(map(len, words))

    # Each word has the label of the window in which it is farthest from both ends.
    numbers = np.random.default_rng(0)
    logits = [numbers.normal(size=(len(ids), 5)).astype(np.float32) for ids in batch.ids]
    results = classifier._entities(texts, [(text,) for text in rows], words, batch, logits)
    for row, result in enumerate(results):
        tags = []
        for index in range(len(words[row])):
            best = -1
            tag = "O"
            for number in np.flatnonzero(windows.rows == row):
                position = expected[number].get(index, -1)
                margin = min(position, len(logits[number]) - 1 - position)
                if margin > best:
                    best = margin
                    tag = classifier.task.labels[logits[number][position].argmax()]
            tags.append(tag)
        assert result["predicted_tags"] == tags


def test_truncated_words_have_no_tag_without_outside_label(tmp_path):
    """With plain tags, words beyond the maximum length get neither an entity nor a tag."""
    names = ["N", "V"]
    folder = write_classifier(tmp_path / "model", NeoBERTForTokenClassification, labels=names)
    write_task(folder, task="tokens", labels=names, max_length=5)
    rows = [{"text": ["the", "good", "film", "is", "long"]}]
    for output in ("out.jsonl", "out.parquet"):
        predictions, _ = run(tmp_path, rows, folder, output=output)
        assert len(predictions[0]["prediction"]) == 3
        tags = predictions[0]["predicted_tags"]
        assert set(tags[:3]) <= set(names) and tags[3:] == [None, None]


def test_logits_are_averaged_over_windows(tmp_path, model):
    """The logits of a long text are the mean of the logits of its windows."""
    long = " ".join(f"Sentence {n} is good." for n in range(40))
    predictions, summary = run(
        tmp_path, rows_of([long, "short"]), model, "--long-texts", "windows", "--probabilities"
    )
    assert summary.truncation.texts == 0 and summary.truncation.longest > 64

    from neobert.embeddings.windows import WindowSettings, text_windows

    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = WindowSettings.from_model(tokenizer, 64, window=62)
    windows = text_windows(tokenizer, 64, [long], "", settings)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        logits = [classifier(torch.tensor(ids[None]).long()).logits[0] for ids in windows.tokens]
    assert len(logits) > 2
    expected = torch.softmax(torch.stack(logits).mean(0) / 2.5, -1)
    values = [predictions[0][f"probability_{label}"] for label in LABELS]
    assert values == pytest.approx(expected.tolist(), abs=2e-5)


def test_overlap_must_be_less_than_the_length(tmp_path, model):
    """The error names the option of this command."""
    options = ["--long-texts", "windows", "--max-length", "16", "--overlap", "14"]
    with pytest.raises(UserError, match="must be less than 14, `--max-length` without the special"):
        run(tmp_path, rows_of(TEXTS), model, *options)


# ------------------------------------------------------------------------------------------------
# files


def test_formats_have_the_same_content(tmp_path, model):
    """JSON Lines, parquet and CSV outputs have the same rows, also if written in several parts."""
    rows = [{"n": n, "text": text, "list": [n]} for n, text in enumerate(TEXTS)]
    jsonl, _ = run(tmp_path, rows, model, "--rows", "7")
    parquet, _ = run(tmp_path, [], model, "--rows", "7", output="out.parquet")
    table, _ = run(tmp_path, [], model, "--rows", "7", output="out.csv")
    assert [{**row, "list": json.dumps(row["list"])} for row in jsonl] == parquet
    assert [row["prediction"] for row in table] == [row["prediction"] for row in jsonl]
    assert [float(row["probability"]) for row in table] == [row["probability"] for row in jsonl]
    assert [(row["n"], row["list"]) for row in table][3] == ("3", "[3]")
    assert not list(tmp_path.glob("*.work"))


def test_values_that_json_does_not_have_become_null(tmp_path, model):
    """NaN and infinity of a parquet file are null in .jsonl, also within lists."""
    nan = float("nan")
    columns = {"text": ["a", "b"], "x": [nan, 1.5], "y": [[nan, 2.0], [-float("inf")]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    arguments = [tmp_path / "in.parquet", tmp_path / "out.jsonl", "--model", model]
    assert main(["predict", *map(str, arguments)]) == 0
    text = (tmp_path / "out.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = read(tmp_path / "out.jsonl")
    assert [(row["x"], row["y"]) for row in rows] == [(None, [None, 2.0]), (1.5, [None])]


def test_parquet_file_without_rows_does_not_determine_types(tmp_path, model):
    """The types of the output are those of the first parquet file that has rows."""
    (tmp_path / "in").mkdir()
    nothing = pyarrow.array([], pyarrow.null())
    tables = {
        "a": pyarrow.table({"text": nothing, "n": nothing}),
        "b": pyarrow.table({"text": TEXTS[:2], "n": pyarrow.array([7, None], pyarrow.int16())}),
        "c": pyarrow.table({"text": TEXTS[2:3], "n": pyarrow.array([8], pyarrow.int16())}),
    }
    for name, table in tables.items():
        pyarrow.parquet.write_table(table, tmp_path / "in" / f"{name}.parquet")
    arguments = [tmp_path / "in", tmp_path / "out.parquet", "--model", model]
    assert main(["predict", *map(str, arguments)]) == 0

    output = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert output.schema.field("text").type == pyarrow.string()
    assert output.schema.field("n").type == pyarrow.int16()
    assert output["text"].to_pylist() == TEXTS[:3] and output["n"].to_pylist() == [7, None, 8]


def test_column_of_several_types_needs_jsonl(tmp_path, model):
    """The error for a column of several types names an output that can represent the column."""
    (tmp_path / "in").mkdir()
    for name, value in (("a", 1), ("b", "x")):
        table = pyarrow.table({"text": ["good"], "n": [value]})
        pyarrow.parquet.write_table(table, tmp_path / "in" / f"{name}.parquet")
    arguments = ["--model", str(model)]
    with pytest.raises(UserError, match="'n' must have the type int64") as error:
        command.main([str(tmp_path / "in"), str(tmp_path / "out.parquet"), *arguments])
    assert str(error.value).endswith("Use an output that ends in .jsonl.")
    assert "--keep" not in str(error.value)

    assert command.main([str(tmp_path / "in"), str(tmp_path / "out.jsonl"), *arguments]) == 0
    assert [row["n"] for row in read(tmp_path / "out.jsonl")] == [1, "x"]


def test_cells_of_a_csv_are_copied_unchanged(tmp_path, model):
    """Cells that look like numbers, quotes and empty cells are not changed in a CSV output."""
    lines = ["id;x,text", '007,"a ""quoted"", text"', "1e3,", "+7,été"]
    (tmp_path / "in.csv").write_text("\n".join(lines), encoding="utf-8")
    arguments = [tmp_path / "in.csv", tmp_path / "out.csv", "--model", model]
    assert main(["predict", *map(str, arguments)]) == 0
    predictions = read(tmp_path / "out.csv")
    assert [row["id;x"] for row in predictions] == ["007", "1e3", "+7"]
    assert [row["text"] for row in predictions] == ['a "quoted", text', "", "été"]
    # The second row has no text, and therefore no prediction.
    assert predictions[1]["prediction"] == "" and predictions[2]["prediction"] in LABELS


def test_line_breaks_in_a_csv_are_quoted(tmp_path, model):
    """A lone carriage return in a cell or a column name does not end a row of a CSV output."""
    rows = [{"text": text, "a\rb": "1"} for text in ("x\ry", "x\ny", "x\r\ny", "plain", 'q"q')]
    run(tmp_path, rows, model, output="out.csv")
    content = (tmp_path / "out.csv").read_bytes().decode()
    assert content.startswith('text,"a\rb",prediction,probability\n"x\ry",1,')
    assert content.endswith("\n") and "\nplain,1," in content
    table = list(csv.reader(io.StringIO(content, newline="")))
    assert [row[0] for row in table[1:]] == [row["text"] for row in rows]


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_lone_surrogates_are_predicted(tmp_path, model, tagger, output):
    """One half of a surrogate pair is predicted as U+FFFD, and copied unchanged."""
    predictions, _ = run(tmp_path, rows_of(["good \ud83d", "good \ufffd"]), model, output=output)
    assert predictions[0]["probability"] == predictions[1]["probability"]
    # Lone surrogates are escapes in the output.
    assert "good \\ud83d" in (tmp_path / output).read_text(encoding="utf-8")
    predictions, _ = run(tmp_path, [], tagger, output=f"tagged-{output}")
    assert predictions[1]["prediction"] == predictions[0]["prediction"]


def test_an_interrupted_run_resumes(tmp_path, model, monkeypatch):
    """A resumed run computes the missing parts only, and writes the same file.

    The run is interrupted after two of five parts.
    """
    expected, _ = run(tmp_path, rows_of(TEXTS), model, "--rows", "5")
    content = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()

    write = command.PartWriter.write
    written = []

    def interrupt(self, classifier, path, file, rows):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return write(self, classifier, path, file, rows)

    monkeypatch.setattr(command.PartWriter, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [], model, "--rows", "5")
    assert not (tmp_path / "out.jsonl").exists()
    # Other options cannot resume the run.
    with pytest.raises(UserError, match="rows 5, now 6"):
        run(tmp_path, [], model, "--rows", "6")

    calls = []
    monkeypatch.setattr(command.PartWriter, "write", lambda *args: calls.append(1) or write(*args))
    predictions, summary = run(tmp_path, [], model, "--rows", "5")
    assert len(calls) == 3 and summary.rows == 24
    assert (tmp_path / "out.jsonl").read_bytes() == content and predictions == expected

    monkeypatch.setattr(command, "PackedClassifier", None)
    assert run(tmp_path, [], model, "--rows", "5")[1] == summary, (
        "A finished run must not load the model."
    )
    with pytest.raises(UserError, match="was written with other settings"):
        run(tmp_path, [], model, "--rows", "5", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"x": "a"}], {}, "has no column 'text', only x"),
        ([{"a;b": "a"}], {}, "has no column 'text', only a;b. Separate the columns by commas"),
        ([{"text": 3}], {}, "row 1: the text must be a string, got 3"),
        ([{"text": "a", "prediction": 1}], {}, "names of the predictions, got prediction"),
        ([{"text": "a"}], {"output": "out.xlsx"}, "`output` must end in one of .csv, .jsonl"),
    ],
)
def test_invalid_input_or_output_is_reported(tmp_path, model, rows, arguments, message):
    """Check the messages about input rows and outputs that cannot be used."""
    with pytest.raises(UserError, match=message):
        run(tmp_path, rows, model, **arguments)


def test_input_without_the_text_column_leaves_no_files(tmp_path, model):
    """The columns of the input are checked before anything is written."""
    with pytest.raises(UserError, match="has no column 'text', only x"):
        run(tmp_path, [{"x": "a"}], model)
    assert not list(tmp_path.glob("out*"))


def test_windows_of_pairs_leave_no_files(tmp_path, model):
    """`--long-texts windows` with a model of pairs is refused before anything is written."""
    arguments = ("--text-column", "text", "other", "--long-texts", "windows")
    pair_model = write_classifier(tmp_path / "pairs")
    write_task(pair_model, text_columns=["text", "other"])
    with pytest.raises(UserError, match="`--long-texts windows` needs one text column, got a mod"):
        run(tmp_path, [{"text": "a", "other": "b"}], pair_model, *arguments)
    assert not list(tmp_path.glob("out*"))


def test_texts_stay_strings_in_parquet(tmp_path, model):
    """The texts of a CSV file are strings in parquet, although all of them are integers."""
    source, output = tmp_path / "rows.csv", tmp_path / "out.parquet"
    source.write_text("text,code\n42,7\n7,8\n")
    predict(OPTIONS["predict"].read([str(source), str(output), "--model", str(model)]), False)
    table = pyarrow.parquet.read_table(output)
    assert [str(table.schema.field(name).type) for name in ("text", "code")] == ["string", "int64"]
    assert table["text"].to_pylist() == ["42", "7"]


def test_a_directory_of_the_user_is_kept(tmp_path, model):
    """A finished run removes its own directory of parts only."""
    run(tmp_path, rows_of(TEXTS), model)
    parts = tmp_path / "out.jsonl.work"
    parts.mkdir()
    (parts / "notes.txt").write_text("mine")
    run(tmp_path, [], model)
    assert (parts / "notes.txt").read_text() == "mine"

    (parts / "run.json").write_text('{"neobert": "predict", "settings": {}}')
    run(tmp_path, [], model)
    assert not parts.exists()


def test_output_of_another_process_is_not_written_again(tmp_path, model, monkeypatch):
    """A run whose output another process has completed in the meantime predicts nothing."""
    expected, summary = run(tmp_path, rows_of(TEXTS), model)
    calls = []
    is_finished = command.Prediction.is_finished
    monkeypatch.setattr(
        command.Prediction,
        "is_finished",
        lambda self: calls.append(1) or (len(calls) > 1 and is_finished(self)),
    )
    monkeypatch.setattr(command, "PackedClassifier", None)
    assert run(tmp_path, [], model) == (expected, summary) and len(calls) == 2
    assert not (tmp_path / "out.jsonl.work").exists()


def test_existing_files_are_kept(tmp_path, model):
    """A file that the command did not write is never replaced."""
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UserError, match="already exists, and is no output of neobert predict"):
        run(tmp_path, rows_of(TEXTS), model)
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_the_record_replaces_no_file_of_the_user(tmp_path, model):
    """The record OUTPUT.json replaces neither an input nor another file of the user."""
    record = tmp_path / "out.csv.json"
    write_jsonl(record, rows_of(TEXTS))
    content = record.read_bytes()
    options = ["--model", str(model), "--dtype", "float32"]
    with pytest.raises(UserError, match="out.csv.json"):
        command.main([str(record), str(tmp_path / "out.csv"), *options])
    assert record.read_bytes() == content

    write_jsonl(tmp_path / "rows.jsonl", rows_of(TEXTS))
    record.write_text('["mine"]')
    with pytest.raises(UserError, match="already exists, and was not written by neobert predict"):
        command.main([str(tmp_path / "rows.jsonl"), str(tmp_path / "out.csv"), *options])
    assert record.read_text() == '["mine"]'
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("output", ["out.csv", "out.parquet", "out.jsonl"])
def test_columns_that_some_rows_lack_are_not_lost(tmp_path, model, output):
    """A column that some rows lack is copied to .jsonl, and an error in other formats."""
    rows = [{"text": "a film"}, {"text": "a film", "note": "x"}]
    for order, message in ((1, "row 2: the first row has no"), (-1, "row 2: there is no")):
        folder = tmp_path / str(order)
        if output == "out.jsonl":
            predictions, _ = run(folder, rows[::order], model, output=output)
            assert [row.get("note") for row in predictions] == [None, "x"][::order]
            continue
        with pytest.raises(UserError, match=f"{message} column 'note'"):
            run(folder, rows[::order], model, output=output)

    # Every row needs the column of the text.
    with pytest.raises(UserError, match="row 2: there is no column 'text'"):
        run(tmp_path / "text", [rows[1], {"note": "x"}], model, output=output)


@pytest.mark.parametrize(
    ("pattern", "output"),
    [("*.jsonl", "b.jsonl"), ("**/*.csv", "b.csv"), ("*.json", "b.csv"), ("*/*.json", "b.csv")],
)
def test_a_glob_that_matches_the_output_is_refused(tmp_path, model, pattern, output):
    """A glob that matches the output, its record or its parts is refused."""
    (tmp_path / "deep").mkdir()
    for name in ("a.jsonl", "a.json", "deep/a.csv", "deep/a.json"):
        (tmp_path / name).write_text("text\n" if name.endswith("csv") else '{"text": "a"}\n')
    options = ["--model", str(model), "--dtype", "float32"]
    with pytest.raises(UserError, match="`output` must not contain files that the glob"):
        command.main([str(tmp_path / pattern), str(tmp_path / output), *options])


def test_a_model_without_a_head_is_refused(tmp_path):
    """The model must be a classifier, not an encoder."""
    runs.write_model(tmp_path / "encoder")
    with pytest.raises(
        UserError, match="`model` must be a classifier, got .* architecture NeoBERT"
    ):
        run(tmp_path, rows_of(TEXTS), tmp_path / "encoder")
