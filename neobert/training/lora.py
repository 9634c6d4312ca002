"""LoRA (Hu et al. 2021, arXiv 2106.09685) through PEFT: what to adapt, how to keep new heads
trainable, adapter to plain model."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

from msgspec import Meta

from ..common.errors import UserError, require
from ..common.options import OptionGroup, option


# All linear layers of a block: Q, K and V are in one matrix, and so are the SwiGLU's two inputs.
NEOBERT_TARGETS = ("qkv", "wo", "w12", "w3")
# Feed-forward of ablation M0 (hidden_act "gelu").
NEOBERT_GELU_TARGETS = ("qkv", "wo", "ffn.0", "ffn.2")


@dataclass(frozen=True)
class LoraOptions(OptionGroup):
    """Options of low-rank adapters."""

    title = "LoRA"

    lora: bool = option(False, "Train low-rank adapters instead of all weights.")
    lora_rank: Annotated[int, Meta(ge=1)] = option(16, "Rank of the adapters.")
    lora_alpha: Annotated[float, Meta(gt=0)] = option(
        32.0, "Scale of the adapters; their output is multiplied by alpha / rank."
    )
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = option(
        0.0, "Dropout probability on the input of the adapters."
    )
    lora_targets: str = option(
        "auto",
        "Names of the layers to adapt, separated by commas; all-linear; or auto, for NeoBERT "
        "qkv,wo,w12,w3.",
    )

    def settings(self) -> dict[str, Any] | None:
        """Return the keyword arguments of `lora_config`, or None without adapters."""
        if not self.lora:
            return None
        return {
            "rank": self.lora_rank,
            "alpha": self.lora_alpha,
            "dropout": self.lora_dropout,
            "targets": self.lora_targets,
        }


def default_targets(config):
    """Names of the layers to adapt: every linear layer of NeoBERT's blocks; PEFT's "all-linear" for
    other encoders."""
    if config.model_type != "neobert":
        return "all-linear"
    return list(NEOBERT_TARGETS if config.hidden_act == "swiglu" else NEOBERT_GELU_TARGETS)


def head_modules(model, missing_keys=()):
    """Names of the modules that are not the backbone and so must be trained in full beside an
    adapter.

    Args:
        model: a transformers model with a task head.
        missing_keys: parameters that its checkpoint did not have (a new pooler inside of the
            backbone, for example).
    """
    backbone = model.base_model_prefix
    heads = {
        name
        for name, child in model.named_children()
        if name != backbone and any(True for _ in child.parameters())
    }
    inside = {key.rpartition(".")[0] for key in missing_keys if key.startswith(f"{backbone}.")}
    return sorted(heads | inside)


def check_adapter_support() -> None:
    """Check that transformers can add and load adapters with the installed version of PEFT.

    sentence-transformers uses that integration; `peft.get_peft_model` does not need it.

    Raises:
        UserError: If transformers requires a newer version of PEFT.
    """
    require("peft", "peft")
    from transformers.integrations import peft as integration
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(min_version=integration.MIN_PEFT_VERSION)
    except ValueError as error:
        raise UserError(
            f"`--lora` needs peft>={integration.MIN_PEFT_VERSION} with transformers "
            f"{version('transformers')}, got {version('peft')}. Upgrade peft, or install "
            "transformers 5.23."
        ) from error


def lora_config(
    model, rank=16, alpha=32, dropout=0.0, targets="auto", task_type=None, modules_to_save=None
):
    """`peft.LoraConfig` with its targets checked.

    Args:
        model: the model to adapt.
        rank: columns r of the low-rank factors.
        alpha: the update is scaled by alpha / rank.
        dropout: probability on the adapter's input.
        targets: module names (matched at the end of the full name), "all-linear", or "auto" for
            `default_targets`.
        task_type: PEFT task type, "SEQ_CLS" or None.
        modules_to_save: modules trained and saved in full.
    Raises:
        UserError: a target that the model does not have. ValueError: PEFT's, a rank below 1.
    """
    require("peft", "peft")
    from peft import LoraConfig

    if targets == "auto":
        targets = default_targets(model.config)
    elif isinstance(targets, str) and targets != "all-linear":
        targets = [name.strip() for name in targets.split(",") if name.strip()]
    if targets != "all-linear":
        _check_targets(model, targets)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type=task_type,
        modules_to_save=modules_to_save,
    )


def _check_targets(model, targets):
    from torch import nn

    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    known = sorted({name.rpartition(".")[2] for name in layers})
    if not targets:
        raise UserError(f"no LoRA target was given; this model has {', '.join(known)}")
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise UserError(
                f"LoRA target {target!r} is not a linear layer or embedding of this model; it has "
                f"{', '.join(known)}"
            )


def trainable_parameters(model):
    """(trainable, all) numbers of parameters."""
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def save_adapter_and_merge(model, adapter_folder):
    """Saves the adapter alone, then folds it into the weights: W + alpha / rank * B A.

    Args:
        model: the `PeftModel`; not usable afterwards.
        adapter_folder: gets adapter_config.json and adapter_model.safetensors, with the modules
            trained in full.
    Returns:
        the plain transformers model.
    """
    model.save_pretrained(str(adapter_folder))
    return model.merge_and_unload()
