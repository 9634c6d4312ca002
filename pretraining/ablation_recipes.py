"""The recipes of the ablation ladder (Table 2 of the paper), and how they are made small.

A rung is a file of recipes/ablations: m0 to m9, and m9 with one optional method of ours each
(m9_wsd, ...).
"""

import math
from dataclasses import dataclass

from ..common.constants import RECIPES
from ..common.published import ABLATIONS
from ..common.yaml_files import read_yaml


CONFIGS = RECIPES / "ablations"
# {rung: (change, published GLUE dev, kept)}; the last rung of the table is a search of
# hyper-parameters, not a training.
PUBLISHED = {name.lower(): rest for name, *rest in ABLATIONS if name != "M10"}
METHODS = {
    "m9_mask_schedule": "M9 + masking falls from 30 to 15 %",
    "m9_wsd": "M9 + warm-up, stable, decay",
}
RUNGS = (*PUBLISHED, *METHODS)


@dataclass(frozen=True)
class Scale:
    """What takes the place of the paper's sizes.

    Args:
        hidden, layers, heads: for 768, 12 and 12.
        length: for 512 tokens, twice of it for longer ones.
        texts: of a step, for 256; for the 512 of M9 twice of it.
        steps, learning_rate: of a run.
        vocabulary: for 30,522.
        corpus_texts: of each corpus, at most.
        probe_texts: sentences of the probe, a quarter of them its test.
    """

    hidden: int
    layers: int
    heads: int
    length: int
    texts: int
    steps: int
    vocabulary: int
    corpus_texts: int
    learning_rate: float
    probe_texts: int


SCALES = {
    "small": Scale(
        hidden=64,
        layers=2,
        heads=2,
        length=64,
        texts=16,
        steps=1500,
        vocabulary=2048,
        corpus_texts=40_000,
        learning_rate=1.5e-3,
        probe_texts=8000,
    ),
    "tiny": Scale(
        hidden=24,
        layers=2,
        heads=2,
        length=16,
        texts=8,
        steps=3,
        vocabulary=200,
        corpus_texts=150,
        learning_rate=3e-3,
        probe_texts=40,
    ),
}


def rung_recipe(name):
    """The paper-size recipe of a rung as a dict."""
    return read_yaml(CONFIGS / f"{name}.yaml")


def shrink(recipe, scale):
    """A rung's recipe at a reduced scale. One scaling rule for all rungs, so that differences
    between rungs are kept.

    The bound of the uniform initialisation grows with 1 / sqrt(width), from 0.02 at 768, so that
    narrow models start with activations as large.
    """
    model = dict(recipe["model_config"])
    heads = scale.heads
    width = model["hidden_size"] / 768 * scale.hidden
    length = scale.length * (2 if recipe["max_length"] > 512 else 1)
    model.update(
        hidden_size=2 * heads * round(width / (2 * heads)),
        num_attention_heads=heads,
        num_hidden_layers=max(1, round(model["num_hidden_layers"] / 12 * scale.layers)),
        intermediate_size=4 * scale.hidden,
        max_position_embeddings=length,
        decoder_init_range=round(0.02 * math.sqrt(768 / scale.hidden), 4),
    )
    model.pop("vocab_size", None)
    small = {
        key: value
        for key, value in recipe.items()
        if key not in ("keep_every", "output", "dataset", "tokenizer", "trainer")
    }
    small |= {
        "model_config": model,
        "max_length": length,
        "column": "text",
        "trainer": _small_trainer(recipe["trainer"], scale),
    }
    if "texts_per_step" in recipe:
        small["texts_per_step"] = small["texts_per_batch"] = (
            recipe["texts_per_step"] * scale.texts // 256
        )
    else:
        small["tokens_per_step"] = small["tokens_per_batch"] = (
            recipe["tokens_per_step"] // 512 * scale.texts // 256 * length
        )
    return small


def _small_trainer(trainer, scale):
    """Trainer's options of a recipe at a reduced scale: what counts steps shrinks with them, after
    a warm-up of a tenth."""
    warmup, share = scale.steps // 10, scale.steps / trainer["max_steps"]
    small = {
        key: value
        for key, value in trainer.items()
        if key not in ("bf16", "dataloader_num_workers")
    }
    if "lr_scheduler_kwargs" in small:
        kwargs = dict(small["lr_scheduler_kwargs"])
        end = kwargs["num_decay_steps"] + (
            trainer["warmup_steps"] if kwargs.get("num_stable_steps") == 0 else 0
        )
        kwargs["num_decay_steps"] = round(end * share) - (
            warmup if kwargs.get("num_stable_steps") == 0 else 0
        )
        small["lr_scheduler_kwargs"] = kwargs
    every = max(1, scale.steps // 10)
    return {
        **small,
        "learning_rate": scale.learning_rate,
        "max_steps": scale.steps,
        "warmup_steps": warmup,
        "logging_steps": every,
        "save_steps": max(1, scale.steps // 2),
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def rung_values(name, scale, paths, out, seed):
    """All options of one rung's small run, as `pretrain.run_of` takes them.

    Args:
        paths: {"curated", "diverse", "wordpiece", "bpe": path}.
        out: output folder; the prepared sets are beside it.
    """
    recipe = rung_recipe(name)
    values = shrink(recipe, scale)
    kind = "bpe" if "tokenizer" in recipe else "wordpiece"
    data = "diverse" if "refinedweb" in str(recipe["dataset"]) else "curated"
    trainer = {**values["trainer"], "seed": seed}
    return {
        **values,
        "dataset": str(paths[data]),
        "tokenizer": str(paths[kind]),
        "prepared": str(out.parent / f"prepared_{data}_{kind}"),
        "output": str(out),
        "trainer": trainer,
    }
