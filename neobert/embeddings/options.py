"""Options of every command that loads an encoder. Imports neither torch nor transformers."""

from dataclasses import dataclass, fields

from ..common.arguments import Arguments, option
from ..common.constants import CPU_TOKENS, CUDA_TOKENS, POOLINGS


TOKENS_HELP = f"tokens in a batch; {CUDA_TOKENS:,} on CUDA, {CPU_TOKENS:,} on the CPU"


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
