"""Pins the rows of `neobert glue`: file kinds that give the same rows, splits, held-out rows, the
Hub's names, and one sentence for rows and options that cannot be used."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from glue_runs import make_world, run  # noqa: F401
from jsonl import write_jsonl
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification

from neobert.common import loading
from neobert.common.errors import UserError
from neobert.finetuning import glue_model, glue_run, glue_tasks
from neobert.finetuning.glue_tasks import TASKS
from neobert.finetuning.options import OPTIONS


# ------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"task": "squad"}, "there is no GLUE task 'squad'; choose all, or from mnli"),
        ({"task": "cola"}, "there is no file of rows .*/cola/train"),
        ({"data": "nobody/nothing"}, "'nobody/nothing' is not a local folder, and task sst2 was"),
        ({"model": "nobody/nothing"}, "no tokenizer was found in nobody/nothing"),
        ({"seeds": "1,1"}, "seeds must be different whole numbers"),
        ({"seeds": "-1"}, "seeds must be at least 0, but -1 was given"),
        ({"heldout_rows": -1}, "heldout_rows must be above 0"),
        ({"selection": "test"}, "selection must be one of heldout, dev"),
        ({"preset": "best"}, "there is no preset 'best'; choose from neobert-4096, neobert-1024"),
        ({"heldout_fraction": 0.001}, "too few to hold 0.001 of them out; use --selection dev"),
        ({"task": "sst2,rte", "heldout_fraction": 0.001}, "too few to hold 0.001 of them out"),
        ({"lora": True, "lora_targets": "query"}, "LoRA target 'query' is not a linear layer"),
        ({"classifier_pooling": "max"}, "classifier_pooling must be one of cls, mean, but 'max'"),
        ({"lora": True, "lora_rank": 0}, "lora_rank must be at least 1, but 0 was given"),
        ({"metric": "bleu"}, "metric must be one of mean, accuracy, f1"),
        ({"metric": "f1"}, "sst2 has no metric 'f1'; choose mean, or from accuracy"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"presets": "{mine: 5}", "preset": "mine"}, "presets on the command line must be a map"),
        (
            {"presets": "{mine: {sst2: {foo: 3}}}", "preset": "mine"},
            "unknown key 'foo' of sst2 in presets or grid_values; allowed are batch_size",
        ),
        (
            {"presets": "{mine: {sst2: {weight_decay: null}}}", "preset": "mine"},
            "weight_decay of sst2 .* must be a list, each a number",
        ),
        (
            {"grid": True, "grid_values": "{weight_decay: [-1]}"},
            "weight_decay of sst2 .* must be at least 0, but -1.0 was given",
        ),
        ({"name": ".."}, "name must be that of a folder below the output, but '..' was given"),
        ({"max_train_samples": 5}, "unknown argument '--max-train-samples'"),
    ],
)
def test_bad_options(world, tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        run(world, tmp_path / "out", **more)
    assert not list((tmp_path / "out").rglob("*.json")), "Work was done although the input is bad."


def test_names_and_grids():
    arguments = ["--task", "sst2", "--model", "here/sub/..", "--grid"]
    grid = "{batch_size: [3], learning_rate: [1e-4], weight_decay: [0]}"
    options, _ = OPTIONS["glue"].read([*arguments, "--grid-values", grid])
    assert options.name == "here", "a row's folder is below the output"
    assert options.combinations(TASKS["sst2"]) == [
        {"batch_size": 3, "learning_rate": 1e-4, "weight_decay": 0.0}
    ]


def test_every_task_is_checked_before_the_first_is_trained(world, tmp_path, monkeypatch):
    processes = SimpleNamespace(num_processes=3, is_main_process=True)
    monkeypatch.setattr(glue_run, "process_state", lambda: processes)
    with pytest.raises(
        UserError, match="the batch size of rte, 16, cannot be shared by 3 processes"
    ):
        run(world, tmp_path / "out", "rte,sst2")
    assert not (tmp_path / "out").exists()


def test_roberta_takes_texts_to_its_last_position_only(world, tmp_path):
    """Its positions start at padding_idx + 1: a table of 34 is for 32 tokens, which its tokenizer
    does not say."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 34,
    }
    RobertaForSequenceClassification(
        RobertaConfig(vocab_size=30522, pad_token_id=1, **sizes)
    ).save_pretrained(tmp_path)
    tokenizer = loading.load_tokenizer(str(world / "bert"))
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path)
    model, _ = glue_model.load_classifier(str(tmp_path), TASKS["sst2"])
    limit = glue_run.text_limit(model, loading.load_tokenizer(str(tmp_path)))
    assert limit == 32
    ids = torch.full((1, limit), 9)
    assert model(input_ids=ids).logits.isfinite().all()
    bert, _ = glue_model.load_classifier(str(world / "bert"), TASKS["sst2"])
    assert glue_run.text_limit(bert, tokenizer) == 64, "BERT's positions start at 0."


GOOD_ROW = {"sentence": "good", "label": 1}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "sst2/train has no rows"),
        ([GOOD_ROW, "{broken"], "train.jsonl, row 2: Expecting property name"),
        ([GOOD_ROW, {"sentence": "bad", "label": 2}], r"row 2: label 2 is out of range; .* \(nega"),
        ([{"sentence": "bad", "label": -1}], "row 1: label -1 is out of range; sst2 takes 0 to 1"),
        ([{"sentence": "bad", "label": 0.5}], "label 0.5 is out of range"),
        ([{"sentence": "bad", "label": "positive"}], "label 'positive' is out of range"),
        ([{"text": "bad", "label": 0}], "row 1: there is no column 'sentence'"),
        ([{"sentence": 5, "label": 0}], "row 1: 'sentence' must be text"),
    ],
)
def test_bad_rows(tmp_path, lines, words):
    path = tmp_path / "sst2" / "train.jsonl"
    path.parent.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    with pytest.raises(UserError, match=words):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


def test_file_kinds_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"sentence1": "a, \u2028 b", "sentence2": 'say "c"', "label": 2.5},
        {"sentence1": "d", "sentence2": "e", "label": 0.0},
    ]
    loaded = []
    for kind in ("jsonl", "csv", "parquet"):
        folder = tmp_path / kind / "stsb"
        for split in ("train", "validation"):
            write_jsonl(folder / f"{split}.jsonl", rows)
            if kind == "csv":
                (folder / f"{split}.jsonl").unlink()
                (folder / f"{split}.csv").write_text(
                    'sentence1,sentence2,label\n"a, \u2028 b","say ""c""",2.5\nd,e,0.0\n'
                )
            elif kind == "parquet":
                (folder / f"{split}.jsonl").unlink()
                pyarrow.parquet.write_table(
                    pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet"
                )
        loaded.append(glue_tasks.load_task(TASKS["stsb"], str(tmp_path / kind)))
    assert loaded[0] == loaded[1] == loaded[2], "One data set in three formats reads differently."
    assert loaded[0]["train"] == {
        "sentence1": ["a, \u2028 b", "d"],
        "sentence2": ['say "c"', "e"],
        "label": [2.5, 0.0],
    }


def test_a_model_without_a_usable_tokenizer(world, tmp_path):
    (tmp_path / "bert").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bert" / name).write_bytes((world / "bert" / name).read_bytes())
    with pytest.raises(UserError, match="no tokenizer was found in"):
        run(world, tmp_path / "out", model=tmp_path / "bert")
    padless = PreTrainedTokenizerFast(
        tokenizer_file=str(world / "bert" / "tokenizer.json"), unk_token="[UNK]"
    )
    padless.save_pretrained(tmp_path / "padless")
    with pytest.raises(UserError, match="has no padding token"):
        run(world, tmp_path / "out", model=world / "bert", tokenizer=tmp_path / "padless")


def test_rows_of_the_hub(monkeypatch):
    import datasets

    asked = []

    def load(name, task, split):
        asked.append((name, task, split))
        return datasets.Dataset.from_list(
            [{"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}]
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    splits = glue_tasks.load_task(TASKS["mnli"], glue_tasks.HUB_DATA)
    assert asked == [
        ("nyu-mll/glue", "mnli", split)
        for split in ("train", "validation_matched", "validation_mismatched")
    ]
    assert splits["train"] == {"premise": ["a"], "hypothesis": ["b"], "label": [2]}


def test_checkpoint_of_another_kind(world, tmp_path):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(world / "model", tmp_path / "model")
    weights = {k: v for k, v in load_file(model / "model.safetensors").items() if "wo" not in k}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"lacks 2 weights of the encoder, model.transformer_encoder.0.wo.weight for example",
    ):
        run(world, tmp_path / "out", model=model)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be loaded as a sequence classifier"):
        run(world, tmp_path / "out", model=model)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match="there is no model in .*neobert convert"):
        run(world, tmp_path / "out", model=model)
