"""Test `neobert finetune`: all tasks, output files, baselines and resumed runs.

A single word determines the label of a row, so that a tiny model reaches a high accuracy.
"""

import os
import random
import signal

import numpy as np
import pytest
import torch
import transformers
from helpers import finetune_runs as runs
from helpers.hub_cache import add_to_cache
from helpers.jsonl import write_jsonl
from helpers.paths import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from neobert.cli import main
from neobert.common.errors import Stopped, UserError
from neobert.common.files import write_json
from neobert.common.sentence_transformers_files import write_pooling
from neobert.embeddings import windows
from neobert.finetuning import comparison, evaluation, finetune_card, plots, token_baselines
from neobert.finetuning.comparison import Baselines, Result, compare
from neobert.finetuning.finetune import (
    Finetuning,
    _encoder_pooling,
    _training_arguments,
    task_record,
)
from neobert.finetuning.finetune_options import FINETUNE
from neobert.finetuning.splits import Splits, read_splits
from neobert.finetuning.tagging import split_words
from neobert.finetuning.text_tasks import Examples, TextTask
from neobert.finetuning.tokenization import tokenize_rows
from neobert.finetuning.trainer import add_adapters, save_model, scale_output
from neobert.prediction.classifier import TaskRecord


def value(result, metric, entry="fine_tuned"):
    """Return the value of a metric in the result of a run."""
    return result[entry]["metrics"][metric]["value"]


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """Return the directory and the result of a finished run of text classification."""
    folder = tmp_path_factory.mktemp("classified")
    return folder, runs.run(folder, runs.classification_rows())


def test_classification(classified):
    """Check the metrics, the baselines and the output files of a classification."""
    folder, result = classified
    output = folder / "out"

    assert value(result, "accuracy") > 0.9
    assert result["rows"] == {"train": 159, "validation": 20, "test": 21}
    assert result["labels"] == ["bad", "good"]
    assert result["reload_difference"] < 1e-5

    names = [entry["name"] for entry in result["baselines"]]
    assert names == [
        "majority class",
        "TF-IDF + logistic regression",
        "frozen embeddings + logistic regression",
    ]
    assert result["baselines"][0]["metrics"]["accuracy"]["value"] == pytest.approx(0.5, abs=0.05)

    assert np.sum(result["confusion_matrix"]) == 21
    assert result["selected"]["epoch"] in range(1, 7) and len(result["history"]) == 6

    assert {path.name for path in output.iterdir()} >= {
        *("README.md", "metrics.json", "task.json", "result.json", "config.json"),
        *("model.safetensors", "tokenizer.json", "modeling_neobert.py"),
        *("confusion_matrix.png", "learning_curve.png"),
    }
    assert not (output / "checkpoints").exists()

    assert runs.read_json(output / "metrics.json") == {
        key: result[key] for key in runs.read_json(output / "metrics.json")
    }

    card = (output / "README.md").read_text(encoding="utf-8")
    assert "| fine-tuned | " in card and "Expected calibration error" in card
    assert str(folder) not in card


def test_saved_model_works_in_the_pipeline(classified):
    """The saved model classifies texts in the pipeline of transformers."""
    folder, result = classified
    classifier = pipeline("text-classification", str(folder / "out"), trust_remote_code=True)
    assert classifier("the story is a gloomy film")[0]["label"] == "bad"
    assert classifier("the story is a lovely film")[0]["label"] == "good"
    assert classifier.model.config.label2id == {"bad": 0, "good": 1}


def test_a_finished_run_is_not_repeated(classified, caplog):
    """Running the command again returns the result, and changed options are an error."""
    folder, result = classified
    before = (folder / "out" / "model.safetensors").stat().st_mtime_ns
    caplog.set_level("INFO", "neobert")
    assert runs.run(folder, []) == result
    assert (folder / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert "already finished" in caplog.text

    with pytest.raises(UserError, match="split_seed 0, now 1"):
        runs.run(folder, [], "--split-seed", "1")


def test_a_resumed_run_has_the_same_weights(classified, tmp_path, monkeypatch):
    """A run that is interrupted after two epochs ends with the results of an uninterrupted run."""
    folder, result = classified
    from neobert.finetuning.trainer import FinetuneTrainer

    evaluate = FinetuneTrainer._maybe_log_save_evaluate

    def interrupt(self, *args, **kwargs):
        evaluate(self, *args, **kwargs)
        if self.state.epoch == 2:
            raise KeyboardInterrupt

    # The first process ends after the second epoch, with a checkpoint.
    monkeypatch.setattr(FinetuneTrainer, "_maybe_log_save_evaluate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runs.run(tmp_path, runs.classification_rows())
    assert list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))

    # The second process resumes from the checkpoint.
    monkeypatch.undo()
    resumed = runs.run(tmp_path, [])

    weights = [load_file(path / "out" / "model.safetensors") for path in (folder, tmp_path)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert resumed["history"] == result["history"]
    assert resumed["fine_tuned"] == result["fine_tuned"]


def test_a_stop_inside_an_epoch_adds_no_evaluation(classified, tmp_path, monkeypatch):
    """A run that SIGTERM stops inside an epoch ends with the results of an uninterrupted run."""
    folder, result = classified
    from neobert.finetuning.trainer import FinetuneTrainer

    train_step = FinetuneTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, *args, **kwargs)

    monkeypatch.setattr(FinetuneTrainer, "training_step", stop)
    with pytest.raises(Stopped):
        runs.run(tmp_path, runs.classification_rows())
    (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-3"

    monkeypatch.undo()
    resumed = runs.run(tmp_path, [])
    weights = [load_file(path / "out" / "model.safetensors") for path in (folder, tmp_path)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert resumed["history"] == result["history"]


def test_a_run_that_stopped_early_is_not_continued(tmp_path, monkeypatch):
    """A run that was killed between early stopping and its result does not train on."""
    options = ("--patience", "1", "--learning-rate", "1e-12", "--num-train-epochs", "6")
    save = Finetuning.save

    def interrupt(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Finetuning, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runs.run(tmp_path, runs.classification_rows(), *options)
    monkeypatch.setattr(Finetuning, "save", save)
    assert len(runs.run(tmp_path, [], *options)["history"]) == 2


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            "regression_rows",
            ["--label-smoothing-factor", "0.1"],
            "must be 0 for regression, got 0.1",
        ),
        (
            "classification_rows",
            ["--eval-delay", "100"],
            "`eval_delay` is set to 0 by this command",
        ),
        ("classification_rows", ["--lora-rank", "4"], "`lora_rank` applies to adapters only."),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path, rows, options, message):
    """Options that would fail after the training, or that have no effect, are an error."""
    with pytest.raises(UserError, match=message):
        runs.run(tmp_path, getattr(runs, rows)(), *options)


def test_evaluations_by_steps_save_a_checkpoint_each(tmp_path):
    """With `--eval-strategy steps`, checkpoints are saved with the evaluations."""
    options = ("--eval-strategy", "steps", "--eval-steps", "4", "--max-steps", "8")
    result = runs.run(tmp_path, runs.classification_rows(), *options)
    assert [entry["step"] for entry in result["history"]] == [4, 8]


@pytest.mark.slow
def test_multi_label_classification(tmp_path):
    """Check a multi-label classification: metric, baselines, configuration and plot."""
    result = runs.run(tmp_path, runs.multi_label_rows())
    assert result["task"] == "multi-label" and value(result, "micro_f1") > 0.9
    assert len(result["baselines"]) == 3
    config = runs.read_json(tmp_path / "out" / "config.json")
    assert config["problem_type"] == "multi_label_classification"
    assert (tmp_path / "out" / "label_f1.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["false", "true"])
def test_regression(tmp_path, lora):
    """Labels far from 0 can be learned, and the saved model predicts them in their original unit.

    Labels are standardized for training, and the saved output layer reverses the standardization.
    """
    rows = [{**row, "score": 100 * row["score"] + 1000.25} for row in runs.regression_rows()]
    result = runs.run(tmp_path, rows, "--num-train-epochs", "20", "--lora", lora)
    assert value(result, "spearman") > 0.7

    model = pipeline("text-classification", str(tmp_path / "out"), function_to_apply="none")
    scores = [row["score"] for row in model([row["text"] for row in rows[:50]])]
    errors = [abs(score - row["score"]) for score, row in zip(scores, rows)]
    # The standard deviation of the labels is 112.
    assert np.mean(errors) < 70

    assert result["reload_difference"] < 1e-2
    assert [entry["name"] for entry in result["baselines"]][0] == "mean label"
    assert result["calibration"] is None
    assert (tmp_path / "out" / "predictions.png").is_file()


def test_token_classification_with_character_spans(tmp_path):
    """Check token classification: metrics, baselines, and entities in the pipeline."""
    result = runs.run(tmp_path, runs.span_rows(), "--num-train-epochs", "12")
    assert value(result, "entity_f1") > 0.9
    assert [entry["name"] for entry in result["baselines"]] == [
        "most frequent tag of every word",
        "words and characters + logistic regression",
        "frozen embeddings + logistic regression",
    ]
    assert [row["label"] for row in result["label_table"]] == ["LOC", "PER"]
    assert result["calibration"]["error_after"] < 0.2

    tagger = pipeline(
        "token-classification",
        str(tmp_path / "out"),
        trust_remote_code=True,
        aggregation_strategy="first",
    )
    entities = [
        (row["word"], row["entity_group"]) for row in tagger("the film of Mary Smith in Rome.")
    ]
    assert entities == [("mary smith", "PER"), ("rome", "LOC")]


@pytest.mark.slow
def test_lora_and_early_stopping(tmp_path):
    """A run with LoRA stops early, saves its adapter, and saves the merged model."""
    pytest.importorskip("peft")
    arguments = ["--lora", "true", "--patience", "1", "--num-train-epochs", "30"]
    result = runs.run(tmp_path, runs.classification_rows(), *arguments)
    assert len(result["history"]) < 30
    assert result["parameters"]["trained"] < result["parameters"]["all"]
    assert result["reload_difference"] < 1e-5
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_zero_shot_classification_with_pairs(tmp_path):
    """A model fine-tuned on pairs with the labels of NLI works in the zero-shot pipeline."""
    columns = ["--text-column", "premise", "hypothesis"]
    result = runs.run(tmp_path, runs.pair_rows(), *columns, "--num-train-epochs", "15")
    assert value(result, "accuracy") > 0.9
    classifier = pipeline("zero-shot-classification", str(tmp_path / "out"), trust_remote_code=True)
    assert classifier.entailment_id == 1
    answer = classifier("the film is a story", ["also", "not"], hypothesis_template="the house {}")
    assert answer["labels"] == ["also", "not"]


def test_the_command_prints_the_comparison(classified, tmp_path, capsys, caplog):
    """The command prints the table of metrics and logs the comparison with the baselines."""
    folder, _ = classified
    caplog.set_level("INFO", "neobert")
    assert main(["finetune", *runs.command_line(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| model | accuracy | macro F1 | matthews |\n")
    assert "| TF-IDF + logistic regression | " in printed
    assert "Fine-tuning is" in caplog.text


@pytest.mark.parametrize(
    ("own", "statement", "is_better"),
    [
        ([1] * 90 + [0] * 10, "Fine-tuning is better than the best baseline, b (accuracy", True),
        ([1] * 51 + [0] * 49, "is not clearly better than the best baseline, b", True),
        ([1] * 50 + [0] * 50, "is not better than the best baseline, b (accuracy +0.000", False),
    ],
)
def test_comparison_statement(own, statement, is_better):
    """Check the statement for 90, 51 and 50 correct predictions; the best baseline has 50.

    `own` contains the predictions of the fine-tuned model for 100 rows.
    """
    labels = np.ones(100, dtype=int)
    other = np.array([1] * 50 + [0] * 50)

    def result(name, predictions):
        accuracy = float(np.mean(predictions))
        return Result(name, {"accuracy": accuracy}, {}, labels, np.array(predictions), 100)

    summary = compare("accuracy", result("own", own), [result("a", [0] * 100), result("b", other)])
    assert statement in summary["statement"] and summary["is_better"] is is_better

    # Both models are measured on the same rows, so the standard error is that of the paired
    # difference, which is smaller than that of independent samples.
    differences = np.array(own) - other
    assert summary["standard_error"] == pytest.approx(differences.std() / 10, rel=0.25, abs=0.004)


def test_mean_distance_of_numeric_labels():
    """The mean distance is computed between numeric class names, and is None for other names."""
    task = TextTask("classification", ("text",), ("stars",), ("1", "2", "5"))
    assert evaluation.mean_distance(task, [0, 1, 2], np.array([0, 2, 0])) == (0 + 3 + 4) / 3
    for names in (("bad", "good"), ("1", "nan")):
        named_task = TextTask("classification", ("text",), ("stars",), names)
        assert evaluation.mean_distance(named_task, [0], np.array([1])) is None


def test_truncated_words_count_as_errors_with_plain_tags():
    """A truncated word never has the correct tag, not even that of the first label."""
    task = TextTask("tokens", ("tokens",), ("tags",), ("N", "V"))
    examples = Examples([("a b c",)], [["V", "N", "N"]], [[(0, 1), (2, 3), (4, 5)]])
    part = evaluation.TokenizedSplit(examples, None, [np.array([1, 2, -1])], 1)
    logits = np.array([[[0, 0], [0, 1], [1, 0], [0, 0]]])
    predicted = evaluation.decode_predictions(task, part, logits)
    assert predicted == [["V", "N", "O"]]
    accuracy = evaluation.metric_values(task, examples.labels, predicted)["word_accuracy"]
    assert accuracy == pytest.approx(2 / 3)


def test_plots_draw_labels_literally(tmp_path):
    """Labels with "$", which encloses formulas in matplotlib, can be plotted."""
    labels = ["$5_to_$10^^", "$"]
    assert plots.plot_confusion([[1, 2], [3, 4]], labels, tmp_path / "confusion.png")
    table = [{"label": label, "f1": 0.5} for label in labels]
    assert plots.plot_label_f1(table, tmp_path / "f1.png")


def test_task_is_saved_for_predict(tmp_path):
    """`neobert predict` splits texts into words as in training."""
    for has_spaces in (False, True):
        task = TextTask("tokens", ("tokens",), (), ("O", "B-X"), bio=True, has_spaces=has_spaces)
        write_json(tmp_path / "task.json", task_record(task, 64, 1.5))
        assert TaskRecord.from_model(str(tmp_path)) == TaskRecord(task, 64, 1.5)


@pytest.mark.parametrize(("mode", "expected"), [("mean", "mean"), ("max", None)])
def test_pooling_of_a_hub_model_is_read(tmp_path, monkeypatch, mode, expected):
    """A sentence encoder on the Hub determines the pooling of the new head, as a directory does."""
    write_pooling(tmp_path / "model", 32, mode)
    add_to_cache(monkeypatch, tmp_path / "hub", tmp_path / "model", "user/model")
    assert _encoder_pooling(str(tmp_path / "model")) == expected
    assert _encoder_pooling("user/model") == expected


def test_a_metric_of_another_task_is_refused(tmp_path):
    """A metric that is not one of the task is an error."""
    write_jsonl(tmp_path / "rows.jsonl", runs.classification_rows())
    runs.write_model(tmp_path / "model")
    with pytest.raises(UserError, match="`metric` must be one of accuracy, macro_f1, matthews for"):
        runs.run(tmp_path, [], "--metric", "spearman")


def logits_of(model, texts):
    """Return the outputs of a regression model for texts, (N,)."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    with torch.no_grad():
        output = model.eval()(**tokenizer(texts, padding=True, return_tensors="pt"))
    return output.logits[:, 0]


def load_regression(path):
    """Load a model with one output in float32."""
    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    )


def prepare(folder, rows, *arguments):
    """Return a run whose trainer has not been built."""
    write_jsonl(folder / "rows.jsonl", rows)
    if not (folder / "model").exists():
        runs.write_model(folder / "model")
    options = FINETUNE.read(runs.command_line(folder, *arguments))
    task, splits = read_splits(options.data)
    training = _training_arguments(options, folder / "checkpoints")
    return Finetuning(options, task, splits, task.metrics[0], training)


def test_a_regression_model_can_be_trained_again(tmp_path):
    """Training starts from the predictions of a regression model in the unit of its labels.

    A model with one output that is not a regression, such as a reranker, is not scaled, and neither
    is a new head.
    """
    rows = [{**row, "score": 10 * row["score"] + 600.25} for row in runs.regression_rows(40)]
    texts = [row["text"] for row in rows]
    runs.write_model(tmp_path / "model")
    model = load_regression(tmp_path / "model")
    model.config.problem_type = "regression"
    torch.nn.init.constant_(model.classifier.bias, 605.0)
    model.save_pretrained(tmp_path / "model")
    before = logits_of(model, texts)

    run = prepare(tmp_path, rows)
    after = logits_of(run.build().model, texts)
    factor, offset = run.scaling
    torch.testing.assert_close(factor * after + offset, before, rtol=0, atol=0.01)

    # Without a problem type, the outputs are not in the unit of the labels.
    config = runs.read_json(tmp_path / "model" / "config.json")
    write_json(tmp_path / "model" / "config.json", {**config, "problem_type": None})
    trainer = prepare(tmp_path, rows).build()
    assert trainer.model.classifier.bias.item() == 605.0

    # A new head does not predict labels in their unit, whatever the problem type.
    encoder = runs.write_model(tmp_path / "model")
    config = runs.read_json(encoder / "config.json")
    write_json(encoder / "config.json", {**config, "problem_type": "regression"})
    trainer = prepare(tmp_path, rows).build()
    assert abs(trainer.model.classifier.bias.item()) < 1


def test_adapter_of_a_regression_has_the_predictions_of_the_saved_model(tmp_path):
    """The adapter contains the scaled output layer, so it predicts labels in their unit."""
    peft = pytest.importorskip("peft")
    rows = [{**row, "score": 10 * row["score"] + 600.25} for row in runs.regression_rows(40)]
    texts = [row["text"] for row in rows]
    run = prepare(tmp_path, rows, "--lora", "true")
    save_model(
        run.build(),
        run.tokenizer,
        model_folder=tmp_path / "out",
        adapter_folder=tmp_path / "out" / "adapter",
        auto_class=AutoModelForSequenceClassification,
        scaling=run.scaling,
    )
    saved = logits_of(load_regression(tmp_path / "out"), texts)
    base = load_regression(tmp_path / "model")
    adapted = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"), texts)
    assert saved.mean() > 500
    torch.testing.assert_close(adapted, saved, rtol=1e-4, atol=0.01)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_the_trained_copy_of_the_output_layer_is_scaled(name):
    """The output of a model with an adapter is scaled, for both structures of a head.

    The head of BERT is a single layer, and that of RoBERTa a module with several layers.
    """
    pytest.importorskip("peft")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        num_labels=1,
    )
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    lora = {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": "auto"}
    model = add_adapters(model, lora, [], "SEQ_CLS").eval()
    ids = torch.randint(5, 50, (3, 7))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        scale_output(model, 3.0, 500.0)
        after = model(input_ids=ids).logits
    torch.testing.assert_close(after, 3 * before + 500)


def test_the_best_weights_are_saved_between_two_checkpoints(tmp_path):
    """The weights of the best step are saved, even if `save_steps` is a multiple of `eval_steps`.

    The first of four evaluations is the best one, and checkpoints are written after every second.
    """
    run = prepare(
        tmp_path,
        runs.classification_rows(40),
        *("--max-steps", "4", "--eval-strategy", "steps", "--eval-steps", "1"),
        *("--save-strategy", "steps", "--save-steps", "2"),
    )
    trainer = run.build()
    weights = []

    def evaluate(output):
        weights.append(trainer.model.classifier.weight.detach().clone())
        return {"score": -len(weights)}

    trainer.compute_metrics = evaluate
    trainer.train()
    assert len(weights) == 4 and trainer.state.best_global_step == 1
    assert torch.equal(trainer.model.classifier.weight, weights[0])
    assert not torch.equal(weights[0], weights[3])


def test_task_names_the_types_of_entities():
    """The tag `O` of the BIO scheme is not an entity type, and plain tags are listed."""
    task = TextTask("tokens", ("tokens",), ("tags",), ("O", "B-PER", "I-PER"), bio=True)
    assert task.describe() == "token classification: entities of the types PER"
    plain = TextTask("tokens", ("tokens",), ("tags",), ("O", "NOUN"))
    assert plain.describe() == "token classification: words with the tags NOUN, O"


def test_a_metric_of_token_classification_is_refused(tmp_path):
    """Token classification has a single metric, so the option must be omitted."""
    with pytest.raises(UserError, match="`metric` has no effect on token .*'accuracy'. Omit --met"):
        runs.run(tmp_path, runs.span_rows(40), "--metric", "accuracy")


@pytest.mark.parametrize("count", [1, plots.MAX_LABELS, plots.MAX_LABELS + 1])
@pytest.mark.parametrize("name", ["classification", "multi-label"])
def test_card_shows_a_plot_only_if_it_is_written(tmp_path, name, count):
    """The model card has an image of the labels exactly if the plot of the labels is written."""
    labels = tuple(f"label {number}" for number in range(count))
    metrics = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "rows": 3}
    result = {
        "label_table": [{"label": label, **metrics} for label in labels],
        "mean_distance": None,
        "confusion_matrix": np.eye(count, dtype=int).tolist(),
    }
    task = TextTask(name, ("text",), ("label",), labels)
    text = finetune_card._labels_section(task, result)

    path = tmp_path / "plot.png"
    if name == "classification":
        is_written = plots.plot_confusion(result["confusion_matrix"], labels, path)
    else:
        is_written = plots.plot_label_f1(result["label_table"], path)
    assert is_written == path.exists() == (count <= plots.MAX_LABELS)
    assert text.count("![") == is_written
    assert all(f"| {label} | 0.500 |" in text for label in labels) and text.endswith("\n\n")


def test_truncated_texts_are_counted(tmp_path, caplog):
    """A truncated text is counted and logged. Also checks a run without baselines."""
    rows = runs.classification_rows()
    rows[0]["text"] = "good " * 100
    result = runs.run(tmp_path, rows, "--max-steps", "1", "--baselines", "false")
    assert sum(result["truncated"].values()) == 1
    assert "Texts of more than 64 tokens are truncated" in caplog.text
    assert result["baselines"] == [] and result["comparison"]["baseline"] is None


@pytest.mark.parametrize("columns", [1, 2])
def test_rows_are_tokenized_in_groups(monkeypatch, columns):
    """Groups of rows have the encodings of a single call of the tokenizer, in the same order.

    `columns` is the number of texts per row.
    """
    generator = random.Random(0)
    rows = [
        tuple(" ".join(generator.choices(runs.FILL, k=generator.randrange(12))) for _ in "ab")
        for _ in range(40)
    ]
    rows = [row[:columns] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    expected = tokenizer(
        *map(list, zip(*rows)), truncation=True, max_length=9, return_offsets_mapping=True
    )

    monkeypatch.setattr(windows, "_CHARACTERS", 150)
    groups = list(tokenize_rows(tokenizer, rows, 9, with_offsets=True))
    assert len(groups) > 5
    assert expected.keys() == {"input_ids", "attention_mask", "offset_mapping"}
    for name, values in expected.items():
        assert [row for encoded, _ in groups for row in encoded[name]] == values

    lengths = [length for _, group_lengths in groups for length in group_lengths]
    complete = [tokenizer(*([text] for text in row))["input_ids"][0] for row in rows]
    assert lengths == list(map(len, complete))
    assert min(lengths) < 9 < max(lengths)
    assert all("offset_mapping" not in encoded for encoded, _ in tokenize_rows(tokenizer, rows, 9))


def test_labels_of_rows_that_are_tokenized_in_groups(monkeypatch):
    """Each row has its label or the tags of its words, also if it is in a later group."""
    monkeypatch.setattr(windows, "_CHARACTERS", 40)
    texts = [(f"film {number} is {'long ' * (number % 4)}good",) for number in range(20)]
    words = [split_words(text) for (text,) in texts]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")

    task = TextTask("regression", ("text",), ("score",))
    scores = [number / 4 for number in range(20)]
    part = evaluation.tokenize(task, Examples(texts, scores, []), tokenizer, 6, scaling=(0.5, 2))
    ids = [tokenizer(text, truncation=True, max_length=6)["input_ids"] for (text,) in texts]
    assert part.dataset["input_ids"][:] == ids
    assert part.dataset["labels"][:] == [(score - 2) / 0.5 for score in scores]
    # [CLS], [SEP], "film", the number, "is" and "good" are six tokens.
    assert part.truncated == 15

    # Each word is one token. The tags are the last digits of the number of the row and the word.
    task = TextTask("tokens", ("text",), ("tags",), tuple("0123456789"))
    tags = [[str((row + word) % 10) for word in range(len(words[row]))] for row in range(20)]
    part = evaluation.tokenize(task, Examples(texts, tags, words), tokenizer, 64)
    expected = [[-100, *map(int, row_tags), -100] for row_tags in tags]
    assert part.dataset["labels"][:] == expected
    assert "offset_mapping" not in part.dataset.column_names


def tagged_examples(texts, tag_of):
    """Return rows whose words have the tags that `tag_of` maps them to, or else `O`."""
    words = [split_words(text) for text in texts]
    tags = [
        [tag_of.get(text[start:end], "O") for start, end in bounds]
        for text, bounds in zip(texts, words)
    ]
    return Examples([(text,) for text in texts], tags, words)


def test_token_baselines_of_training_rows_without_entities(tmp_path):
    """If all training words have the tag `O`, every baseline predicts `O` for every word."""
    model = str(runs.write_model(tmp_path))
    train = tagged_examples(["the film is long", "a story of Mary"], {})
    test = tagged_examples(["Mary is in the house", "", "a film"], {"Mary": "B-X"})
    tokenizer = AutoTokenizer.from_pretrained(model)
    baselines = token_baselines.fit_token_baselines(train, test, model, tokenizer, 64)
    assert len(baselines) == 3
    for baseline in baselines:
        assert baseline.tags == [["O"] * 5, [], ["O"] * 2], f"Unexpected tags of {baseline.name}."
        assert baseline.train_rows == 2


def test_token_baselines_learn_from_a_random_sample(monkeypatch, tmp_path):
    """Linear models are fitted on random rows, because the rows of a file may be sorted."""
    texts = ["the film is a story"] * 40 + ["Mary saw the house"] * 40
    train = tagged_examples(texts, {"Mary": "B-X"})
    monkeypatch.setattr(token_baselines, "MAX_TRAIN_WORDS", 60)
    monkeypatch.setattr(token_baselines, "MAX_EMBEDDED_WORDS", 100)
    test = tagged_examples(["Mary saw the film"], {"Mary": "B-X"})
    model = str(runs.write_model(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(model)
    baselines = token_baselines.fit_token_baselines(train, test, model, tokenizer, 64)
    assert baselines[1].tags == test.labels
    # The texts have 4 or 5 words.
    assert baselines[0].train_rows == 80
    assert 12 <= baselines[1].train_rows <= 15 and 20 <= baselines[2].train_rows <= 25


@pytest.mark.parametrize("max_words", [1, 7, 60, 10_000])
def test_sample_has_a_maximum_number_of_words(max_words):
    """A sample has at most `max_words` words, and at least one row.

    The rows keep their order and their tags. Another row would exceed the maximum.
    """
    generator = random.Random(0)
    texts = [" ".join([f"w{number}"] * generator.randrange(2, 7)) for number in range(200)]
    # The second half of the rows has other tags.
    train = tagged_examples(texts, {f"w{number}": "B-X" for number in range(100, 200)})
    sample = token_baselines._sample(train, max_words)

    indices = [train.texts.index(row) for row in sample.texts]
    assert indices == sorted(set(indices)) and indices
    assert sample == train.select(indices)
    count = sum(len(words) for words in sample.words)
    total = sum(len(words) for words in train.words)
    if max_words >= total:
        assert sample == train
    elif max_words == 1:
        assert len(sample) == 1
    else:
        # A row has at most 6 words.
        assert max_words - 6 < count <= max_words
    if max_words == 60:
        assert min(indices) < 100 <= max(indices)


def test_embedding_baseline_is_skipped_for_a_sample_with_one_label(tmp_path, monkeypatch):
    """The baseline on embeddings is left out if the sample of training rows has a single label."""
    train = Examples([(f"film {number}",) for number in range(60)], [0] * 59 + [1], [])
    validation = Examples([("a house",), ("a film",)], [0, 1], [])
    task = TextTask("classification", ("text",), ("label",), ("a", "b"))
    options = FINETUNE.read(
        ["rows.jsonl", "--output", "out", "--model", str(runs.write_model(tmp_path / "model"))]
    )
    # The row with the other label is not in the sample. The sample of the model on TF-IDF features
    # contains all rows.
    monkeypatch.setattr(comparison, "MAX_TRAIN_ROWS", 5)
    baselines = Baselines(task, Splits(train, validation, validation), options, None, 64)
    names = [result.name for result in baselines.results("accuracy")]
    assert names == ["majority class", "TF-IDF + logistic regression"]


def test_pair_features_contain_difference_and_product():
    """The features of a pair are both embeddings, their absolute difference and their product."""

    class Encoder:
        """Encoder whose embeddings are the length of a text and 1."""

        def encode(self, texts, show_progress_bar):
            return np.array([[len(text), 1.0] for text in texts])

    # The embeddings are [1, 1] and [3, 1].
    features = comparison._embeddings(Encoder(), Examples([("a", "bbb")], [0], []))
    assert features.tolist() == [[1, 1, 3, 1, 2, 0, 3, 1]]
    assert TextTask("classification", ("a", "b"), ("c",), ("x", "y")).describe() == (
        "classification of pairs with 2 labels: x, y"
    )


@pytest.mark.slow
def test_default_options_with_the_bundled_encoder(tmp_path):
    """With the default options, the bundled encoder learns to classify definitions.

    The label of a definition is its first words, which are removed from the text. The majority
    class would reach an accuracy of about one third.
    """
    lines = (ROOT / "examples" / "definitions.tsv").read_text(encoding="utf-8").splitlines()
    texts = [line.split("\t")[1] for line in lines]
    rows = []
    for start in ("the act of", "a person who", "the quality of"):
        endings = [text[len(start) :] for text in texts if text.startswith(start)][:120]
        rows += [{"text": ending, "label": start} for ending in endings]
    write_jsonl(tmp_path / "rows.jsonl", rows)

    code = main(
        [
            *("finetune", str(tmp_path / "rows.jsonl")),
            *("--model", str(ROOT / "examples" / "sentence-encoder")),
            *("--output", str(tmp_path / "out")),
        ]
    )

    result = runs.read_json(tmp_path / "out" / "result.json")
    assert code == 0 and result["warning"] is None
    assert value(result, "accuracy") > 0.7

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.classifier_pooling == "mean"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 30522


@pytest.mark.slow
def test_name_tagging_beats_the_most_frequent_tag_baseline(tmp_path):
    """Fine-tuning finds more names than a baseline with the most frequent tag of each word.

    These rows were created from WordNet and are also used for a row of the README.
    """
    names = ROOT / "tests" / "data" / "names"
    code = main(
        [
            *("finetune", str(names / "train.jsonl"), "--test-file", str(names / "test.jsonl")),
            *("--model", str(ROOT / "examples" / "sentence-encoder"), "--num-train-epochs", "6"),
            *("--output", str(tmp_path / "out")),
        ]
    )

    result = runs.read_json(tmp_path / "out" / "result.json")
    assert code == 0 and result["rows"]["test"] == 80
    assert value(result, "entity_f1") > 0.45
    frequent = result["baselines"][0]["metrics"]["entity_f1"]["value"]
    assert 0.4 < frequent < 0.45
