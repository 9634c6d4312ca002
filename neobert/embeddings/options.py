"""Options of every command that loads an encoder. Imports neither torch nor transformers."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common import options as nested
from ..common.arguments import Arguments, option
from ..common.constants import CPU_TOKENS, CUDA_TOKENS, POOLINGS


TOKENS_HELP = f"tokens in a batch; {CUDA_TOKENS:,} on CUDA, {CPU_TOKENS:,} on the CPU"
BATCH_TOKENS_HELP = (
    f"Maximum number of tokens per batch. By default {CUDA_TOKENS:,} on CUDA and {CPU_TOKENS:,} on "
    "the CPU."
)


@dataclass(kw_only=True)
class EncoderOptions(Arguments):
    """How the encoder is loaded."""

    max_length: int | None = option(
        None,
        "tokens per text, longer texts are cut; by default the model's own limit",
        least=3,
        most=2**31 - 1,
    )
    pooling: str = option("mean", "for a bare encoder", choices=POOLINGS)
    tokenizer: str | None = option(None, "tokenizer, where the model's folder has none")
    attn_implementation: str | None = option(None, "attention implementation of transformers")
    trust_remote_code: bool = option(False, "run the model repository's own code", free=True)

    def loading(self):
        """How `load_sentence_transformer` loads it."""
        return {field.name: getattr(self, field.name) for field in fields(EncoderOptions)}


@dataclass(frozen=True)
class EncoderGroup(nested.OptionGroup):
    """Options of loading an encoder."""

    title = "Encoder"

    max_length: Annotated[int, Meta(ge=3, le=2**31 - 1)] | None = nested.option(
        None,
        "Maximum sequence length in tokens; longer texts are truncated. By default the limit of "
        "the model.",
    )
    pooling: Literal[POOLINGS] = nested.option(  # type: ignore[valid-type]
        "mean", "Pooling of an encoder without a pooling module."
    )
    tokenizer: str | None = nested.option(
        None,
        "Tokenizer of a model whose directory has none: a directory or a name on the Hub.",
        metavar="NAME",
    )
    attn_implementation: str | None = nested.option(
        None, "Attention implementation of transformers.", metavar="NAME"
    )
    trust_remote_code: bool = nested.option(
        False, "Run the Python code in the repository of the model.", affects_results=False
    )

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `load_sentence_transformer`."""
        return {item.name: getattr(self, item.name) for item in fields(EncoderGroup)}
