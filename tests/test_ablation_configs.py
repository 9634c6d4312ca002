"""Pins the ladder's recipes to the paper's Table 2: what each rung changes and nothing else; and
the small-scale ladder's machinery."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from neobert import __main__ as cli
from neobert.common.constants import TOKENIZER
from neobert.common.optimisation import make_schedule
from neobert.common.yaml_files import read_yaml
from neobert.configuration_neobert import NeoBERTConfig
from neobert.pretraining import ablation_recipes, ablation_report, pretrain
from neobert.pretraining.schedule import paper_schedule


COSINE = {
    "num_stable_steps": 0,
    "num_decay_steps": 898_000,
    "decay_type": "cosine",
    "min_lr_ratio": 0.1,
}
# rung: (the rung that it changes, the keys that PAPER's Table 2 and section 4 let it change)
CHANGES = {
    "m1": (
        "m0",
        {
            "position_embedding_type": ("learned", "rope"),
            "hidden_act": ("gelu", "swiglu"),
            "norm_type": ("layer", "rms"),
        },
    ),
    "m2": (
        "m1",
        {
            "dataset": (
                ["wikimedia/wikipedia:20231101.en", "bookcorpus/bookcorpus@refs/convert/parquet"],
                "tiiuae/falcon-refinedweb",
            ),
            "column": ("text", "content"),
        },
    ),
    "m3": ("m2", {"tokenizer": (None, "meta-llama/Llama-2-7b-hf"), "vocab_size": (None, 32064)}),
    # Adam is AdamW without decay.
    "m4": (
        "m2",
        {
            "lr_scheduler_type": ("linear", "warmup_stable_decay"),
            "lr_scheduler_kwargs": (None, COSINE),
            "adam_beta2": (0.999, 0.95),
            "weight_decay": (0.0, 0.1),
        },
    ),
    "m5": (
        "m4",
        {
            "mlm_probability": (0.15, 0.2),
            "mask_replace_prob": (0.8, 1.0),
            "random_replace_prob": (0.1, 0.0),
        },
    ),
    "m6": (
        "m5",
        {
            "layout": ("packed", "packed_without_boundaries"),
            "texts_per_step": (256, None),
            "texts_per_batch": (32, None),
            "tokens_per_step": (None, 131_072),
            "tokens_per_batch": (None, 16_384),
        },
    ),
    "m7": ("m5", {"num_hidden_layers": (12, 16), "hidden_size": (768, 1056)}),
    "m8": ("m5", {"num_hidden_layers": (12, 28)}),
    "m9": (
        "m8",
        {
            "max_length": (512, 4096),
            "max_position_embeddings": (512, 4096),
            "texts_per_step": (256, 512),
            "texts_per_batch": (32, 4),
            "dropout": (0.1, 0.0),
        },
    ),
    # Ours, each one line.
    "m9_mask_schedule": ("m9", {"mask_schedule": (None, [0.3, 0.15])}),
    "m9_wsd": (
        "m9",
        {
            "lr_scheduler_kwargs": (
                COSINE,
                {"num_decay_steps": 200_000, "decay_type": "1-sqrt", "min_lr_ratio": 0.0},
            )
        },
    ),
}


def _flat(name):
    recipe = ablation_recipes.rung_recipe(name)
    recipe.pop("output")
    sections = [recipe.pop(name) for name in ("model_config", "trainer")]
    return {**recipe, **sections[0], **sections[1]}


@pytest.mark.parametrize("rung", CHANGES)
def test_a_rung_changes_what_the_paper_says_and_nothing_else(rung):
    base, allowed = CHANGES[rung]
    before, after = _flat(base), _flat(rung)
    changed = {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }
    assert changed == allowed, f"{rung} against {base}"


def test_m0_is_the_papers_bert():
    m0 = _flat("m0")
    expected = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "norm_type": "layer",
        "position_embedding_type": "learned",
        "hidden_act": "gelu",
        "dropout": 0.1,
        "mlm_probability": 0.15,
        "mask_replace_prob": 0.8,
        "random_replace_prob": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
        "lr_scheduler_type": "linear",
        "max_length": 512,
        "max_steps": 1_000_000,
        "learning_rate": 6e-4,
        "warmup_steps": 2000,
    }
    assert {key: m0[key] for key in expected} == expected
    assert m0["texts_per_step"] * m0["max_length"] == 131_072, (
        "a step has 131,072 tokens, as the paper counts them"
    )
    m9 = _flat("m9")
    assert m9["texts_per_step"] * m9["max_length"] == 2_097_152


def _parameters(rung):
    """Parameters from the shapes of PAPER section 2: tied nowhere, decoder with a bias."""
    values = ablation_recipes.rung_recipe(rung)["model_config"]
    config = NeoBERTConfig(**values)
    hidden, inner, vocabulary = config.hidden_size, config.ffn_inner_size, config.vocab_size
    block = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    return 2 * vocabulary * hidden + vocabulary + config.num_hidden_layers * block + hidden


def test_m7_and_m8_are_the_250m_models():
    assert _parameters("m8") == 245_136_954, "M8 must have exactly the published size"
    assert abs(_parameters("m7") - 245e6) < 10e6, (
        f"M7 is a 250M model too, not {_parameters('m7'):,}"
    )


@pytest.mark.parametrize(
    "stage, steps, length, keys",
    [(1, 1_000_000, 1024, {}), (2, 50_000, 4096, {"mixture": {0: 0.2, 1024: 0.4, 2048: 0.4}})],
)
def test_the_stages_have_the_papers_values(stage, steps, length, keys):
    path = ablation_recipes.CONFIGS.parent / f"neobert_stage{stage}.yaml"
    # bf16 is refused where the device has none; it is checked from the file.
    run = pretrain.read_run([str(path), "--bf16", "false", "--report-to", "none"])
    expected = {
        "max_steps": steps,
        "learning_rate": 6e-4,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "warmup_steps": 2000,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": paper_schedule(steps, 2000)["lr_scheduler_kwargs"],
    }
    assert {key: getattr(run.training, key) for key in expected} == expected
    assert read_yaml(path)["trainer"]["bf16"] is True
    batch = run.batch
    assert (batch.max_length, batch.mlm_probability, batch.mask_replace_prob, batch.long_texts) == (
        length,
        0.2,
        1.0,
        "truncate",
    )
    assert (run.data.dataset, run.data.column, batch.layout) == (
        "tiiuae/falcon-refinedweb",
        "content",
        "packed",
    )
    assert batch.texts_per_step * length == 2_097_152 and batch.accumulation(8) == 8, (
        "32 rows of 1,024 or 8 of 4,096, 8 times on 8 devices"
    )
    assert all(getattr(batch, key) == value for key, value in keys.items())
    if stage == 2:
        assert run.model.init_from == "runs/neobert_stage1", (
            "stage 2 must start from stage 1's output"
        )
    else:
        config = NeoBERTConfig(**run.model.model_config)
        assert (
            config.hidden_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.intermediate_size,
        ) == (768, 28, 12, 3072)


def test_the_defaults_are_the_papers_too():
    run = pretrain.read_run(["--dataset", "a.txt", "--report-to", "none"])
    names = (
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "warmup_steps",
        "max_steps",
        "max_grad_norm",
    )
    assert [getattr(run.training, name) for name in names] == [
        6e-4,
        0.1,
        0.9,
        0.95,
        1e-8,
        2000,
        1_000_000,
        1.0,
    ]
    assert (run.training.lr_scheduler_type, run.training.lr_scheduler_kwargs) == (
        "warmup_stable_decay",
        COSINE,
    )
    assert (run.data.column, run.batch.mlm_probability, run.batch.mask_replace_prob) == (
        "text",
        0.2,
        1.0,
    )


@pytest.mark.parametrize(
    "path", sorted(ablation_recipes.RECIPES.rglob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_is_read_and_its_schedule_ends_where_the_paper_says(path):
    if (
        path.parent.name == "accelerate"
        or "pretrain" not in path.read_text()
        and path.parent.name != "ablations"
    ):
        pytest.skip("not a recipe of pre-training")
    given = ["--tokenizer", str(TOKENIZER), "--bf16", "false", "--report-to", "none"]
    run = pretrain.read_run([str(path), *given])
    assert run.batch.accumulation(8 if "example" not in path.stem else 1) >= 1, (
        "the size of a step is stated"
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    training = run.training
    scheduler = make_schedule(
        training.lr_scheduler_type,
        optimizer,
        training.warmup_steps,
        training.max_steps,
        training.lr_scheduler_kwargs,
    )
    last = scheduler.lr_lambdas[0](training.max_steps - 1)
    assert (
        last == pytest.approx(0.0, abs=1e-4)
        if training.lr_scheduler_type == "linear" or "wsd" in path.stem
        else last == pytest.approx(0.1)
    )


def test_shrinking_keeps_what_the_rungs_differ_in():
    scale = ablation_recipes.SCALES["small"]
    small = {
        name: ablation_recipes.shrink(ablation_recipes.rung_recipe(name), scale)
        for name in ablation_recipes.RUNGS
    }
    shapes = {
        name: (
            small[name]["model_config"]["num_hidden_layers"],
            small[name]["model_config"]["hidden_size"],
        )
        for name in small
    }
    # 12 layers of 768 become 2 of 64; 16 of 1,056 in proportion 3 of 88; 28 of 768: 5 of 64.
    assert (
        shapes["m0"] == (2, 64)
        and shapes["m7"] == (3, 88)
        and shapes["m8"] == (5, 64) == shapes["m9"]
    ), shapes
    assert small["m0"]["model_config"]["decoder_init_range"] == pytest.approx(
        0.02 * 12**0.5, abs=1e-4
    ), "0.02 at 768 is 0.069 at 64"
    assert (
        small["m6"]["layout"] == "packed_without_boundaries"
        and small["m9"]["max_length"] == 2 * small["m8"]["max_length"]
    )
    assert (
        small["m9"]["texts_per_step"] == 2 * small["m8"]["texts_per_step"]
        and small["m9"]["texts_per_batch"] == 32
    )
    assert (
        small["m6"]["tokens_per_step"]
        == small["m5"]["texts_per_step"] * small["m5"]["max_length"]
        == 1024
    )
    trainer = {name: small[name]["trainer"] for name in small}
    assert (
        trainer["m0"]["weight_decay"] == 0.0
        and trainer["m4"]["weight_decay"] == 0.1
        and small["m5"]["mlm_probability"] == 0.2
    )
    # 90 % of 1,500 steps less the warm-up of 150; the last 20 % of them.
    assert [
        trainer[name]["lr_scheduler_kwargs"]["num_decay_steps"] for name in ("m4", "m9", "m9_wsd")
    ] == [1200, 1200, 300]
    assert small["m9_mask_schedule"]["mask_schedule"] == [0.3, 0.15]


@pytest.fixture
def corpora(tmp_path):
    rng = np.random.default_rng(0)
    words = ["good", "bad", "river", "stone", "music", "paper", "Table", "winter"]

    def write(name, count, label=False):
        rows = []
        for _ in range(count):
            row = {"text": " ".join(rng.choice(words, rng.integers(3, 9)))}
            rows.append({**row, "label": int("good" in row["text"])} if label else row)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        return str(tmp_path / f"{name}.jsonl")

    return {
        "curated": write("curated", 150),
        "diverse": write("diverse", 200),
        "heldout": write("heldout", 20),
        "probe": write("probe", 40, True),
    }


@pytest.mark.slow
def test_the_ladder_runs_measures_and_reports(corpora, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--scale",
        "tiny",
        "--seeds",
        "1",
        "--rungs",
        "m0,m3,m6",
        "--work",
        "work",
        "--output",
        "results",
    ]
    arguments += [piece for name, path in corpora.items() for piece in (f"--{name}", path)]
    assert cli.main(["ablations", *arguments]) == 0
    result = json.loads((tmp_path / "results" / "ablations_tiny.json").read_text())
    assert [(row["rung"], row["seed"]) for row in result["runs"]] == [
        ("m0", 0),
        ("m3", 0),
        ("m6", 0),
    ]
    for row in result["runs"]:
        assert (
            0 <= row["probe_accuracy"] <= 1
            and 0 <= row["masked_accuracy"] <= 1
            and row["masked_bits_per_character"] > 0
        )
    text = (tmp_path / "results" / "ablations_tiny.md").read_text()
    assert (
        "Small-scale" in text and "| M6 | packing without document boundaries | no | 80.5 |" in text
    )
    assert (tmp_path / "results" / "ablations_tiny.png").stat().st_size > 10_000
    assert len(AutoTokenizer.from_pretrained(tmp_path / "work" / "data" / "bpe")) > len(
        AutoTokenizer.from_pretrained(tmp_path / "work" / "data" / "wordpiece")
    )
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("measured.json")}
    assert cli.main(["ablations", *arguments]) == 0
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("measured.json")}, (
        "finished rungs must not run again"
    )
    assert cli.main(["ablations", *arguments, "--steps", "4"]) == 2, (
        "finished rungs of 3 steps must not pass for rungs of 4"
    )
    assert (
        "work holds a ladder with steps 3, now 4; give the same, or another --work"
        in capsys.readouterr().err
    )
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    for more, words in (
        (
            ["--work", "new", "--steps", "4"],
            "results holds a ladder with steps 3, now 4; give the same, or another --output",
        ),
        (["--work", "new", "--probe", corpora["heldout"]], "has no 'label'"),
        (["--work", "new", "--heldout", corpora["diverse"]], "results holds a ladder with heldout"),
        (
            ["--work", "new", "--rungs", "m3"],
            "ablations_tiny.json holds m0 seed 0, which new does not; give its --work",
        ),
    ):
        assert (
            cli.main(["ablations", *arguments, *more]) == 2 and words in capsys.readouterr().err
        ), more
    assert not (tmp_path / "new").exists() and before == {
        path: path.read_bytes() for path in (tmp_path / "results").iterdir()
    }


def test_some_rungs_again_leave_the_others_in_the_report(corpora, tmp_path, monkeypatch):
    """Runs that have been measured, without the training: m0 and m6 with a seed, then m6 with
    two."""
    monkeypatch.chdir(tmp_path)
    figures = {
        "parameters": 1e6,
        "steps": 3,
        "tokens_seen": 384,
        "cpu_seconds": 1.5,
        "probe_accuracy": 0.5,
        "masked_accuracy": 0.1,
        "masked_bits_per_character": 3.0,
    }
    for name, seed in (("m0", 0), ("m6", 0), ("m6", 1)):
        path = tmp_path / "work" / f"{name}_seed{seed}" / "measured.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"rung": name, "seed": seed, **figures}))
    arguments = ["--scale", "tiny", "--work", "work", "--output", "results"]
    arguments += [piece for name, path in corpora.items() for piece in (f"--{name}", path)]
    for name in ("write_result", "draw"):
        with monkeypatch.context() as patch:
            patch.setattr(ablation_report, name, Mock(side_effect=KeyboardInterrupt))
            assert cli.main(["ablations", *arguments, "--rungs", "m0", "--seeds", "1"]) == 130, (
                "the next run replaces what is half written"
            )
    for more in (["--rungs", "m0,m6", "--seeds", "1"], ["--rungs", "m6", "--seeds", "2"]):
        assert cli.main(["ablations", *arguments, *more]) == 0
        runs = json.loads((tmp_path / "results" / "ablations_tiny.json").read_text())["runs"]
        assert [(row["rung"], row["seed"]) for row in runs] == [("m0", 0), ("m6", 0), ("m6", 1)]
        text = (tmp_path / "results" / "ablations_tiny.md").read_text()
        assert "| M0 |" in text and "| M6 |" in text and "over 1 to 2 seeds" in text


def test_files_of_others_are_not_replaced(corpora, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--scale",
        "tiny",
        "--work",
        "work",
        "--output",
        "results",
        *(f"--{name}={path}" for name, path in corpora.items()),
    ]
    for name in (
        "results/ablations_tiny.json",
        "results/ablations_tiny.md",
        "results/ablations_tiny.png",
        "work/ladder.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("[]")
        assert cli.main(["ablations", *arguments]) == 2
        assert (
            f"{name} was not made by neobert ablations" in capsys.readouterr().err
            and path.read_text() == "[]"
        )
        path.unlink()
    assert not list((tmp_path / "work").iterdir()), (
        "nothing may be written before the output is known to be good"
    )


def test_the_spread_is_over_seeds():
    runs = [
        {"rung": "m1", "seed": seed, "probe_accuracy": value}
        for seed, value in enumerate((0.5, 0.6, 0.7))
    ]
    others = {
        "masked_accuracy": 0,
        "masked_bits_per_character": 0,
        "parameters": 0,
        "steps": 0,
        "tokens_seen": 0,
        "cpu_seconds": 0,
    }
    runs = [{**run, **others} for run in runs]
    assert "| 60.0 ± 10.0 | 0.0 ± 0.0 |" in ablation_report.table(runs)
    assert "| 50.0 | 0.0 |" in ablation_report.table(runs[:1]), "one seed has no spread"


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--scale", "huge"], "scale must be one of"),
        (["--rungs", "m0,m11"], "no rung 'm11'"),
        (["--rungs", ","], "there is no rung ','"),
        (["--seeds", "0"], "seeds must"),
        (["--steps", "0"], "steps must"),
        (["--work", "broken.jsonl"], "work must be a folder or a new name"),
        (["--output", "broken.jsonl"], "output must be a folder or a new name"),
        (["--diverse", "absent.jsonl"], "there is no file absent.jsonl"),
        (["--heldout", "broken.jsonl"], "line 2"),
        (["--heldout", "latin.jsonl"], "line 1 is not JSON (it is not UTF-8)"),
        (["--probe", "unlabelled.jsonl"], "has no 'label'"),
        (["--probe", "onesided.jsonl"], "labels must be 0 and 1"),
    ],
)
def test_bad_input_is_one_sentence(capsys, tmp_path, monkeypatch, wrong, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / "unlabelled.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "onesided.jsonl").write_text('{"text": "a", "label": 1}\n')
    assert cli.main(["ablations", *wrong]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
    assert not (tmp_path / "runs").exists(), (
        "nothing may be written before the input is known to be good"
    )
