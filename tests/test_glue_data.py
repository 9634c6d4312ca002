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
    ("more", "sentence"),
    [
        ({"task": "squad"}, "there is no GLUE task 'squad'; choose all, or from mnli"),
        ({"task": "wnli"}, "wnli is left out"),
        ({"task": "cola"}, "there is no folder .*cola"),
        (
            {"data": "nobody/nothing"},
            "'nobody/nothing' is not a local folder, and task sst2 was not loaded from the Hub",
        ),
        (
            {"model": "nobody/nothing"},
            "neither a model folder nor a model that can be reached on the Hub",
        ),
        ({"seeds": "1,1"}, "seeds must be different whole numbers"),
        ({"seeds": "-1"}, "seeds must be at least 0, but -1 was given"),
        ({"seeds": 2**32}, "seeds must be below 4294967296"),
        ({"heldout_rows": -1}, "heldout_rows must be above 0"),
        (
            {"task": "sst2,rte", "max_train_samples": 5},
            "rte has 5 training rows, too few to hold 0.1 of them out",
        ),
        ({"selection": "test"}, "selection must be one of heldout, dev"),
        ({"preset": "best"}, "there is no preset 'best'; choose from neobert-4096, neobert-1024"),
        ({"num_train_epochs": 0}, "num_train_epochs must be above 0, but 0.0 was given"),
        ({"heldout_fraction": 0.001}, "too few to hold 0.001 of them out; use --selection dev"),
        (
            {"lora": True, "lora_targets": "query"},
            "LoRA target 'query' is not a linear layer or embedding of this model; it has "
            "classifier, dense, encoder, qkv",
        ),
        (
            {"classifier_pooling": "max"},
            "classifier_pooling must be one of cls, mean, but 'max' was given",
        ),
        ({"lora": True, "lora_rank": 0}, "lora_rank must be at least 1, but 0 was given"),
        ({"metric": "bleu"}, "there is no metric 'bleu'; choose from accuracy"),
        ({"metric": "f1"}, "sst2 has no metric 'f1'; choose mean, or from accuracy"),
        ({"adam_beta1": 2}, "Trainer's options: Invalid beta parameter"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers must be at least 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1"),
        (
            {"num_train_epochs": ".inf"},
            "num_train_epochs must be a finite number, but inf was given",
        ),
        (
            {"presets": "{mine: 5}", "preset": "mine"},
            "presets on the command line must be a mapping, each a mapping, each a mapping",
        ),
        (
            {"presets": "{mine: {sst2: {foo: 3}}}", "preset": "mine"},
            "unknown key 'foo' of sst2 in presets or grid_values; allowed are batch_size",
        ),
        (
            {"presets": "{mine: {sst2: {weight_decay: null}}}", "preset": "mine"},
            "weight_decay of sst2 .* must be a list, each a number",
        ),
        (
            {"grid": True, "grid_values": "{foo: [3]}"},
            "unknown key 'foo' of sst2 in presets or grid_values; allowed are batch_size",
        ),
        (
            {"grid": True, "grid_values": "{weight_decay: [true]}"},
            "weight_decay of sst2 .* must be a list, each a number, but .True. was given",
        ),
        (
            {"grid": True, "grid_values": "{weight_decay: [.nan]}"},
            "grid_values must be made of finite numbers",
        ),
        (
            {"grid": True, "grid_values": "{weight_decay: [-1]}"},
            "weight_decay of sst2 .* must be at least 0, but -1.0 was given",
        ),
        ({"name": ".."}, "name must be that of a folder below the output, but '..' was given"),
        ({"report_to": "nonsense"}, "report_to 'nonsense' is unknown; installed are none"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"max_length": 2}, "max_length must be at least 8, but 2 was given"),
        (
            {"learning_rates": 1},
            "unknown argument '--learning-rates'; did you mean --learning-rate",
        ),
    ],
)
def test_bad_options(world, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(world, tmp_path / "out", **more)
    assert not list((tmp_path / "out").rglob("*.json")), "Work was done although the input is bad."


def test_the_output_is_apart_from_what_is_read(world, tmp_path):
    for output in (world / "model", world / "data", world):
        with pytest.raises(UserError, match=f"the output {output} (is|holds) the input"):
            run(world, output)
    assert (
        OPTIONS["glue"].read(["--task", "sst2", "--model", f"{tmp_path}/sub/.."])[0].name
        == tmp_path.name
    ), "a row's folder is below the output"
    grid = OPTIONS["glue"].read(
        [
            "--task",
            "sst2",
            "--model",
            "m",
            "--grid",
            "--grid-values",
            "{batch_size: 3, learning_rate: [1e-4], weight_decay: [0]}",
        ]
    )
    assert grid[0].combinations(TASKS["sst2"]) == [
        {"batch_size": 3, "learning_rate": 1e-4, "weight_decay": 0.0}
    ]


def test_every_task_is_checked_before_the_first_is_trained(world, tmp_path, monkeypatch):
    monkeypatch.setattr(
        glue_run, "fine_tune", lambda *_: pytest.fail("A task was trained before all were checked.")
    )
    for task in ("sst2", "rte"):
        for split in ("train", "validation"):
            lines = (world / "data" / task / f"{split}.jsonl").read_text().splitlines()
            write_jsonl(
                tmp_path / "data" / task / f"{split}.jsonl",
                [json.loads(line) for line in lines[: 5 if task == "rte" else None]],
            )
    with pytest.raises(
        UserError,
        match="rte has 5 training rows, too few to hold 0.1 of them out; use --selection dev",
    ):
        run(world, tmp_path / "out", "sst2,rte", data=tmp_path / "data")
    monkeypatch.setattr(
        glue_run, "process_state", lambda: SimpleNamespace(num_processes=3, is_main_process=True)
    )
    with pytest.raises(
        UserError, match="the batch size of rte, 16, cannot be shared by 3 processes"
    ):
        run(world, tmp_path / "out", "rte")


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
    ("lines", "sentence"),
    [
        ([], "train.jsonl has no rows"),
        ([GOOD_ROW, "{broken"], "train.jsonl, line 2 is not JSON"),
        ([GOOD_ROW, [1, 2]], r"line 2 must be an object {...}, one a line, but is \[1, 2\]"),
        (
            [GOOD_ROW, {"sentence": "bad", "label": 2}],
            r"line 2: label 2 is out of range; sst2 takes a whole number from 0 to 1 \(negative, "
            r"positive\)",
        ),
        ([{"sentence": "bad", "label": -1}], "line 1: label -1 is out of range"),
        ([{"sentence": "bad", "label": 0.5}], "label 0.5 is out of range"),
        ([{"sentence": "bad", "label": "positive"}], "label 'positive' is out of range"),
        (
            [{"text": "bad", "label": 0}],
            "line 1 has no 'sentence'; sst2 needs the columns sentence, label",
        ),
        ([{"sentence": None, "label": 0}], "line 1 has no 'sentence'"),
        ([{"sentence": 5, "label": 0}], "'sentence' must be text, but 5 was given"),
    ],
)
def test_bad_rows(tmp_path, lines, sentence):
    path = tmp_path / "sst2" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    with pytest.raises(UserError, match=sentence):
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


def test_quotes_are_characters_in_tsv_and_quote_in_csv(tmp_path):
    texts = [
        f'"{i} opens and never closes' if i % 3 == 0 else f'{i} says "so", twice'
        for i in range(150)
    ]
    folder = tmp_path / "sst2"
    folder.mkdir()
    for split, rows in (("train", texts), ("validation", texts[:21])):
        (folder / f"{split}.tsv").write_text(
            "sentence\tlabel\n" + "".join(f"{text}\t1\n" for text in rows)
        )
    splits = glue_tasks.load_task(TASKS["sst2"], str(tmp_path))
    assert splits["train"]["sentence"] == texts and splits["validation"]["sentence"] == texts[:21]
    (folder / "train.tsv").unlink()
    for text, sentence in (
        ('"open,1\nnext,0\n', "is broken .*; are its quotes closed"),
        ('"open,1\n"next,0\n', "is broken"),
        (
            "one, two,1\n",
            "train.csv, line 2 has more columns than the first line, 2; a separator in a text",
        ),
    ):
        (folder / "train.csv").write_text("sentence,label\n" + text)
        with pytest.raises(UserError, match=sentence):
            glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


@pytest.mark.parametrize("second", ["train.csv", "train-00000-of-00001.jsonl"])
def test_two_copies_of_a_split_are_refused(tmp_path, second):
    write_jsonl(tmp_path / "sst2" / "train.jsonl", [GOOD_ROW])
    (tmp_path / "sst2" / second).write_text("")
    with pytest.raises(
        UserError,
        match=(
            rf"has the split 'train' more than once \(.*{second}.*\); leave one file, or "
            r"shards of one"
        ),
    ):
        glue_tasks.load_task(TASKS["sst2"], str(tmp_path))


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
    (tmp_path / "st" / "0_Transformer").mkdir(parents=True)
    (tmp_path / "st" / "0_Transformer" / "config.json").write_text("{}")
    (tmp_path / "st" / "modules.json").write_text(
        '[{"path": "0_Transformer"}, {"path": "1_Pooling"}]'
    )
    with pytest.raises(
        UserError,
        match="is a sentence encoder whose model is in a folder of its own; give .*0_Transformer",
    ):
        run(world, tmp_path / "out", model=tmp_path / "st")


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
