"""Pins the scripts of examples/: each is under 60 lines, and learns a small task from scratch well above chance, on data made here."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from neobert import NeoBERTConfig, NeoBERTModel


datasets = pytest.importorskip("datasets")
from transformers import AutoTokenizer  # noqa: E402


ROOT = Path(__file__).resolve().parents[1]
COLOURS = "red green blue white black brown yellow purple".split()
THINGS = "house boat tree road horse garden table church".split()
NAMES = "john mary peter anna".split()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = NeoBERTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        embedding_init_range=0.3,
    )
    NeoBERTModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def run(name, data, model_folder, tmp_path, make_row, epochs="6"):
    """Writes data made by `make_row(generator)`, runs the example's main and returns its metrics."""
    generator = random.Random(0)
    for split, count in (("train", 320), ("test", 64)):
        data.mkdir(exist_ok=True)
        (data / f"{split}.jsonl").write_text("".join(json.dumps(make_row(generator)) + "\n" for _ in range(count)))
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 60, f"{path.name} is promised to be under 60 lines."
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = tmp_path / "out"
    metrics = module.main(
        ["--model", str(model_folder), "--data", str(data), "--output", str(output), "--epochs", epochs, "--learning_rate", "3e-3"]
    )
    assert (output / "config.json").is_file() and (output / "tokenizer.json").is_file(), (
        "The trained model and its tokenizer were not saved."
    )
    return metrics


def test_text_classification(model_folder, tmp_path):
    def row(generator):
        name, thing = generator.choice(NAMES), generator.choice(THINGS)
        return {"text": f"{name} saw the {thing}", "label": "person" if name in ("john", "peter") else "other"}

    metrics = run("text_classification", tmp_path / "data", model_folder, tmp_path, row)
    assert metrics["eval_accuracy"] > 0.9, f"accuracy {metrics['eval_accuracy']} on a task that one word decides (chance is 0.5)."
    labels = json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]
    assert labels == {"0": "other", "1": "person"}, "The saved configuration should name the labels of the data."


def test_a_label_that_training_lacks_is_one_sentence(model_folder, tmp_path, capsys):
    labels = iter(["good"] * 320 + ["bad"] * 64)
    with pytest.raises(SystemExit):
        run("text_classification", tmp_path / "data", model_folder, tmp_path, lambda generator: {"text": "a house", "label": next(labels)})
    assert "test.jsonl has the label 'bad', which no row of train.jsonl has (it has good)" in capsys.readouterr().err


def test_token_classification(model_folder, tmp_path):
    def row(generator):
        words = ["the", generator.choice(COLOURS), generator.choice(THINGS), "of", generator.choice(NAMES)]
        return {"tokens": words, "tags": ["O", "COLOUR", "O", "O", "PERSON"]}

    metrics = run("token_classification", tmp_path / "data", model_folder, tmp_path, row, epochs="2")
    assert metrics["eval_accuracy"] > 0.95, f"accuracy {metrics['eval_accuracy']}; naming every word O gives 0.6."


def test_question_answering(model_folder, tmp_path):
    def row(generator):
        colour, thing = generator.choice(COLOURS), generator.choice(THINGS)
        context = f"{' '.join(generator.choices(THINGS, k=generator.randrange(4)))} a {colour} {thing}".strip()
        return {"question": "which colour?", "context": context, "answers": {"text": [colour], "answer_start": [context.index(colour)]}}

    metrics = run("question_answering", tmp_path / "data", model_folder, tmp_path, row)
    assert metrics["eval_exact"] > 0.8, f"exact spans {metrics['eval_exact']}; a guess among the positions gives less than 0.3."
