"""Test the recipes of the ablations against Table 2 of the paper.

Each ablation changes the settings of the paper and nothing else.
"""

import pytest
import torch
from helpers.paths import ROOT

from neobert.common.constants import TOKENIZER
from neobert.common.files import read_yaml
from neobert.configuration_neobert import NeoBERTConfig
from neobert.pretraining import command as pretrain
from neobert.pretraining.schedule import paper_schedule
from neobert.training.optimization import make_schedule


RECIPES = ROOT / "recipes"


COSINE = {
    "num_stable_steps": 0,
    "num_decay_steps": 898_000,
    "decay_type": "cosine",
    "min_lr_ratio": 0.1,
}
# Ablation: (its base, {key: (value of the base, value of the ablation)}), from Table 2 and
# section 4 of the paper. No other key may change.
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
    # Adam is AdamW without weight decay.
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
            "global_batch_size": (256, None),
            "micro_batch_size": (32, None),
            "global_batch_tokens": (None, 131_072),
            "micro_batch_tokens": (None, 16_384),
        },
    ),
    "m7": ("m5", {"num_hidden_layers": (12, 16), "hidden_size": (768, 1056)}),
    "m8": ("m5", {"num_hidden_layers": (12, 28)}),
    "m9": (
        "m8",
        {
            "max_length": (512, 4096),
            "max_position_embeddings": (512, 4096),
            "global_batch_size": (256, 512),
            "micro_batch_size": (32, 4),
            "dropout": (0.1, 0.0),
        },
    ),
    # These ablations are not in the paper. Each changes one setting.
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
    """Return all settings of a recipe except for its output, as one dictionary."""
    recipe = read_yaml(RECIPES / "ablations" / f"{name}.yaml")
    recipe.pop("output")
    sections = [recipe.pop(name) for name in ("model_config", "trainer")]
    return {**recipe, **sections[0], **sections[1]}


@pytest.mark.parametrize("rung", CHANGES)
def test_ablation_changes_only_the_expected_settings(rung):
    """Each ablation differs from its base in the settings of the paper only."""
    base, allowed = CHANGES[rung]
    before, after = _flat(base), _flat(rung)
    changed = {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }
    assert changed == allowed, (
        f"The recipe {rung} differs from {base} in other settings than in the paper."
    )


def test_every_ablation_of_table_2_has_a_recipe():
    """Every ablation of Table 2 has a recipe, except for M10.

    M10, the last one, is a search for hyperparameters.
    """
    published = {f"m{number}" for number in range(10)}
    recipes = {path.stem for path in (RECIPES / "ablations").glob("*.yaml")}
    assert published == {name for name in recipes if "_" not in name}
    assert {"m0", *CHANGES} == recipes


def test_m0_matches_the_bert_baseline():
    """The recipe m0 has the settings of the paper's BERT baseline."""
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

    # The paper states batch sizes in tokens: 131,072 for M0 and 2,097,152 for M9.
    assert m0["global_batch_size"] * m0["max_length"] == 131_072
    m9 = _flat("m9")
    assert m9["global_batch_size"] * m9["max_length"] == 2_097_152


@pytest.mark.parametrize(
    "stage, steps, length, keys",
    [(1, 1_000_000, 1024, {}), (2, 50_000, 4096, {"mixture": {0: 0.2, 1024: 0.4, 2048: 0.4}})],
)
def test_stage_recipes_match_the_paper(stage, steps, length, keys):
    """The recipes of both training stages have the values of the paper."""
    path = RECIPES / f"neobert_stage{stage}.yaml"
    # A device without bf16 rejects the option, so its value is read from the file below.
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

    options = run.options
    batch = options.batch
    assert (batch.max_length, batch.long_texts, batch.layout) == (length, "truncate", "packed")
    masking = options.masking
    assert (masking.mlm_probability, masking.mask_replace_prob) == (0.2, 1.0)
    assert (options.data.dataset, options.data.column) == ("tiiuae/falcon-refinedweb", "content")

    # On 8 devices, 8 micro-batches per device of 32 rows with 1,024 tokens, or 8 rows with 4,096.
    assert (
        batch.global_batch_size * length == 2_097_152 and batch.gradient_accumulation_steps(8) == 8
    )
    assert all(getattr(batch, key) == value for key, value in keys.items())
    assert options.model.init_from == (None if stage == 1 else "runs/neobert_stage1")

    if stage == 1:
        config = NeoBERTConfig(**options.model.model_config)
        assert (config.hidden_size, config.num_hidden_layers) == (768, 28)
        assert (config.num_attention_heads, config.intermediate_size) == (12, 3072)


PRETRAINING = [
    path
    for path in sorted(RECIPES.rglob("*.yaml"))
    if path.parent.name == "ablations"
    or path.parent.name != "accelerate"
    and "pretrain" in path.read_text()
]


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_recipes_are_valid_and_end_at_the_expected_learning_rate(path):
    """All pre-training recipes are valid, and their learning rate ends at the value of the paper.

    Linear decay and the WSD recipes end at 0, all other recipes at 10% of the maximum.
    """
    options = ["--tokenizer", str(TOKENIZER), "--bf16", "false", "--report-to", "none"]
    run = pretrain.read_run([str(path), *options])
    accumulation = run.options.batch.gradient_accumulation_steps(
        8 if "example" not in path.stem else 1
    )
    # Only the domain recipe does not set the global batch size, which then depends on the number of
    # devices.
    assert accumulation is None if path.stem == "adapt_domain" else accumulation >= 1

    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    training = run.training
    scheduler_type = training.lr_scheduler_type
    kwargs = training.lr_scheduler_kwargs
    scheduler = make_schedule(
        scheduler_type, optimizer, training.warmup_steps, training.max_steps, kwargs
    )
    last = scheduler.lr_lambdas[0](training.max_steps - 1)
    ends_at_zero = scheduler_type == "linear" or "wsd" in path.stem
    assert last == pytest.approx(0.0 if ends_at_zero else 0.1, abs=1e-4)
