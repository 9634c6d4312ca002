"""LoRA (Hu et al. 2021, arXiv 2106.09685) with PEFT: targets, trainable heads, and merging."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from ..common.errors import UserError, require
from ..common.options import OptionGroup, option


if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


# All linear layers of a block: Q, K and V share one matrix, as do the two inputs of SwiGLU.
NEOBERT_TARGETS = ("qkv", "wo", "w12", "w3")
# The feed-forward of ablation M0 has `hidden_act` "gelu".
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
        "Comma-separated names of the layers to adapt, or all-linear. auto: qkv,wo,w12,w3 for "
        "NeoBERT, all-linear for other encoders.",
    )

    def __post_init__(self) -> None:
        changed = [
            item.name
            for item in fields(LoraOptions)
            if item.name != "lora" and getattr(self, item.name) != item.default
        ]
        if changed and not self.lora:
            raise UserError(
                f"`{changed[0]}` applies to adapters only. Pass --lora, or omit the option."
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


def default_targets(config: "PretrainedConfig") -> str | list[str]:
    """Return the names of the layers to adapt.

    Returns:
        All linear layers of NeoBERT's blocks, or "all-linear" for other encoders.
    """
    if config.model_type != "neobert":
        return "all-linear"
    return list(NEOBERT_TARGETS if config.hidden_act == "swiglu" else NEOBERT_GELU_TARGETS)


def head_modules(model: "PreTrainedModel", missing_keys: Iterable[str] = ()) -> list[str]:
    """Return the names of the modules outside the backbone, which are trained in full.

    Args:
        model: Model of transformers with a task head.
        missing_keys: Parameters that the checkpoint of the model does not contain, such as those of
            a new pooler within the backbone.
    """
    # PEFT freezes all weights without an adapter. New layers must be trained in full, as their
    # weights are random.
    backbone = model.base_model_prefix
    heads = {
        name
        for name, child in model.named_children()
        if name != backbone and any(True for _ in child.parameters())
    }
    new_parameters = [key for key in missing_keys if key.startswith(f"{backbone}.")]
    return sorted(heads | {key.rpartition(".")[0] for key in new_parameters})


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
    model: Any,
    rank: int = 16,
    alpha: float = 32,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "auto",
    task_type: str | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> "LoraConfig":
    """Return a `peft.LoraConfig` for a model, after a check of its targets.

    Args:
        model: Model of transformers to adapt.
        rank: Rank r of the low-rank factors.
        alpha: Scale: the update is multiplied by alpha / rank.
        dropout: Dropout probability on the input of the adapters.
        targets: Module names, which match the end of the full name; "all-linear"; or "auto" for
            `default_targets`.
        task_type: Task type of PEFT, "SEQ_CLS" or None.
        modules_to_save: Modules that are trained and saved in full.

    Raises:
        UserError: If the model has no module of a target's name.
        ValueError: If PEFT rejects a value, such as a rank below 1.
    """
    require("peft", "peft")
    from peft import LoraConfig

    # PEFT itself finds all linear layers. Other targets become a list of layer names.
    if targets == "auto":
        targets = default_targets(model.config)
    elif isinstance(targets, str) and targets != "all-linear":
        targets = [name.strip() for name in targets.split(",") if name.strip()]
    if targets != "all-linear":
        _check_targets(model, targets)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=targets,  # type: ignore[arg-type]
        task_type=task_type,  # type: ignore[arg-type]
        modules_to_save=modules_to_save,  # type: ignore[arg-type]
    )


def _check_targets(model: "nn.Module", targets: Sequence[str]) -> None:
    """Check that every target is the name of a linear layer or an embedding.

    Raises:
        UserError: If there is no target, or no layer of its name.
    """
    from torch import nn

    # PEFT ignores a target that matches no layer as long as another one does.
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    layer_names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    if not targets:
        raise UserError(
            f"`lora_targets` must name at least one layer. Layers of the model: {layer_names}."
        )
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise UserError(
                f"LoRA target {target!r} is not a linear layer or embedding of this model. Layers "
                f"of the model: {layer_names}."
            )


def trainable_parameters(model: "nn.Module | None") -> tuple[int, int]:
    """Return the number of trainable parameters, and the number of all parameters."""
    if model is None:
        return 0, 0
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trainable, sum(p.numel() for p in model.parameters())


def save_adapter_and_merge(model: "PeftModel", adapter_folder: str | Path) -> Any:
    """Save the adapter, then merge it into the weights: W + alpha / rank * B A.

    Args:
        model: Model with an adapter, which cannot be used afterwards.
        adapter_folder: Directory for adapter_config.json and adapter_model.safetensors, which also
            contains the modules that were trained in full.

    Returns:
        The model of transformers without the adapter.
    """
    # Merging removes the adapter from the model, so the adapter is saved first.
    model.save_pretrained(str(adapter_folder))
    return model.merge_and_unload()
