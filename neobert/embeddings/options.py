"""Options of every command that loads an encoder. Imports neither torch nor transformers."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import (
    DEFAULT_CPU_BATCH_TOKENS,
    DEFAULT_CUDA_BATCH_TOKENS,
    POOLINGS,
    TRUST_REMOTE_CODE_HELP,
)
from ..common.errors import UserError
from ..common.options import OptionGroup, option


BATCH_TOKENS_HELP = (
    f"Maximum number of tokens per batch. By default {DEFAULT_CUDA_BATCH_TOKENS:,} on CUDA and "
    f"{DEFAULT_CPU_BATCH_TOKENS:,} on the CPU."
)

AUTO_DTYPE_HELP = (
    "auto is float16 on CUDA; on a CPU it is float16 or bfloat16 if a short measurement shows at "
    "least twice the speed of float32, and float32 otherwise."
)


@dataclass(frozen=True)
class EncoderOptions(OptionGroup):
    """Options for loading an encoder."""

    title = "Encoder"

    max_length: Annotated[int, Meta(ge=3, le=2**31 - 1)] | None = option(
        None,
        "Maximum sequence length in tokens; longer texts are truncated. By default the limit of "
        "the model.",
    )
    pooling: Literal[POOLINGS] | None = option(  # type: ignore[valid-type]
        None, "Pooling of an encoder without a pooling module. (default: mean)"
    )
    tokenizer: str | None = option(
        None,
        "Tokenizer of an encoder whose directory has none: a directory or a name on the Hub.",
        metavar="NAME",
    )
    attn_implementation: str | None = option(
        None,
        "Attention implementation of transformers, such as sdpa, eager or flash_attention_2. By "
        "default the choice of transformers.",
        metavar="NAME",
    )
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE_HELP, affects_results=False)

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `load_sentence_transformer`."""
        # Fields of subclasses are options of their command and not arguments of this function.
        return {item.name: getattr(self, item.name) for item in fields(EncoderOptions)}


def check_limit(name: str, value: int | None, limit: int | None) -> None:
    """Raise UserError if the value of an option is above the limit of the model."""
    if value is not None and limit is not None and value > limit:
        raise UserError(
            f"`{name}` must be at most {limit:,}, the value of the model, got {value:,}. Lower "
            f"`--{name.replace('_', '-')}`."
        )
