"""Options of `neobert throughput`: models, implementations and presets.

Imports neither torch nor transformers, so `--help` stays fast.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP
from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, flatten, option


# Keys of `models.MODELS`, which cannot be imported without torch.
MODELS = (
    "neobert",
    "bert-base",
    "bert-large",
    "roberta-base",
    "roberta-large",
    "modernbert-base",
    "modernbert-large",
)


@dataclass(frozen=True)
class Implementation:
    """Attention implementation and batch layout of a measurement.

    Attributes:
        attention: Value of `attn_implementation`.
        layout: "native" (NeoBERT packs, the others compute on padding), "padded" (NeoBERT with
            unpad_inputs=False), "published" (NeoBERT as published: padded, with an additive mask
            that is expanded to (B, H, L, L)), or "packed" by the caller (the other models do not
            compute on padding either).
        compiled: Whether every block is compiled, with a dynamic number of tokens.
    """

    attention: str
    layout: str = "native"
    compiled: bool = False


IMPLEMENTATIONS = {
    "sdpa": Implementation("sdpa"),
    "padded": Implementation("sdpa", "padded"),
    "published": Implementation("sdpa", "published"),
    "compiled": Implementation("sdpa", compiled=True),
    "flash_attention_2": Implementation("flash_attention_2"),
    "flash_attention_2-packed": Implementation("flash_attention_2", "packed"),
    "flash_attention_2-compiled": Implementation("flash_attention_2", compiled=True),
    "flash_attention_3": Implementation("flash_attention_3"),
    "flex_attention": Implementation("flex_attention"),
}

# Implementations that other models do not have.
NEOBERT_ONLY = ("padded", "published")

# Defaults of the options that the command line does not set. The preset cpu takes minutes to hours.
PRESETS: dict[str, dict[str, Any]] = {
    "gpu": {
        "models": list(MODELS),
        "implementations": list(IMPLEMENTATIONS),
        "sets": [
            "512",
            "1024",
            "2048",
            "4096",
            "8192",
            "normal-256",
            "normal-4096",
            "short",
            "fill-20",
            "fill-40",
            "fill-60",
            "fill-80",
        ],
        "max_batch": 512,
        "max_tokens": 1 << 17,
        "repeats": 20,
        "warmup": 3,
    },
    "cpu": {
        "models": ["neobert", "modernbert-base", "bert-base"],
        "implementations": ["sdpa", "padded", "published"],
        "sets": ["short", "128", "512", "normal-256", "fill-20", "fill-40", "fill-60", "fill-80"],
        "max_batch": 32,
        "max_tokens": 8192,
        "repeats": 5,
        "warmup": 1,
    },
    "quick": {
        "models": ["neobert", "modernbert-base"],
        "implementations": ["sdpa"],
        "sets": ["short"],
        "max_batch": 8,
        "max_tokens": 1024,
        "repeats": 3,
        "warmup": 1,
    },
}


def check_workload(name: str, texts: str | None = None) -> None:
    """Check the name of a workload.

    Args:
        name: Length of all sequences ("512"), distribution of lengths ("normal-256", "short"),
            percentage of non-padding tokens ("fill-30"), or "texts".
        texts: File whose lengths are the workload "texts".

    Raises:
        UserError: If there is no such workload.
    """
    # A percentage has one or two digits, as 100 % would be batches without padding.
    is_valid = re.fullmatch(r"[1-9]\d*|fill-[1-9]\d?|normal-256|normal-4096|short", name)
    if not is_valid and not (name == "texts" and texts):
        raise UserError(
            f"`--sets` must name workloads such as 512, normal-256, normal-4096, short or fill-30, "
            f"got {name!r}. The workload texts needs --texts FILE."
        )


@dataclass(frozen=True)
class WorkloadOptions(OptionGroup):
    """Models to compare and the batches that they process."""

    title = "Workload"

    output: str = option(
        help="New directory for throughput.json, throughput.md and the plots.", metavar="PATH"
    )
    preset: Literal["gpu", "cpu", "quick"] | None = option(
        None,
        "Set of defaults for the options below; quick is a trial run. By default gpu if a GPU is "
        "available, else cpu.",
    )
    models: list[Literal[MODELS]] | None = option(None, "Models to compare.")  # type: ignore[valid-type]
    implementations: list[Literal[tuple(IMPLEMENTATIONS)]] | None = option(  # type: ignore[valid-type]
        None, "Implementations to measure, as listed above."
    )
    sets: list[str] | None = option(None, "Workloads, as listed above.", metavar="NAME")
    texts: str | None = option(
        None,
        "Text file with one text per line, for the workload texts.",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None, "Tokenizer for --texts. By default the bundled one.", metavar="PATH"
    )
    batch: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Batch size in sequences. By default the largest that --max-batch and --max-tokens allow.",
    )
    max_batch: Annotated[int, Meta(ge=1)] | None = option(None, "Maximum batch size in sequences.")
    max_tokens: Annotated[int, Meta(ge=1)] | None = option(
        None, "Maximum number of tokens per batch, including padding."
    )
    seed: Annotated[int, Meta(ge=0)] = option(0, "Random seed of the lengths and token ids.")


@dataclass(frozen=True)
class MeasurementOptions(OptionGroup):
    """Hardware, precision and repetitions."""

    title = "Measurement"

    device: str | None = option(None, DEVICE_HELP, metavar="NAME")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None,
        "Precision of the weights and the computation. By default bfloat16 on GPUs, else float32.",
    )
    threads: Annotated[int, Meta(ge=1)] | None = option(None, "Number of CPU threads.")
    repeats: Annotated[int, Meta(ge=1)] | None = option(
        None, "Number of timed repetitions per measurement."
    )
    warmup: Annotated[int, Meta(ge=1)] | None = option(
        None, "Number of repetitions before the timed ones."
    )
    clock: Literal["wall", "processor"] = option(
        "wall",
        "Clock of the timing. wall: elapsed time. processor: CPU time of this process, for "
        "machines with other load; needs --device cpu --threads 1.",
    )
    layers: Annotated[int, Meta(ge=1)] | None = option(
        None, "Number of layers to keep in every model, for trial runs. By default all."
    )


@dataclass(frozen=True)
class ThroughputOptions:
    """Options of `neobert throughput`."""

    workload: WorkloadOptions
    measurement: MeasurementOptions = MeasurementOptions()


@dataclass(frozen=True)
class Plan:
    """Measurement to run: the options with the defaults of the preset and the device.

    The attributes are those of `WorkloadOptions` and `MeasurementOptions`.
    """

    output: str
    preset: str
    models: list[str]
    implementations: list[str]
    sets: list[str]
    texts: str | None
    tokenizer: str | None
    batch: int | None
    max_batch: int
    max_tokens: int
    seed: int
    device: str
    dtype: str
    threads: int | None
    repeats: int
    warmup: int
    clock: str
    layers: int | None

    @classmethod
    def from_options(cls, options: ThroughputOptions) -> "Plan":
        """Return the plan of the options, with the defaults of the device and the preset.

        Raises:
            UserError: If the device, the clock or a workload cannot be used, or if there is nothing
                to measure.
        """
        values = _with_defaults(flatten(options))
        _check_values(values)

        plan = cls(**values)
        # The models of a preset may be omitted silently, but requested ones may not.
        measured = {model for model, _ in plan.pairs()}
        if omitted := [name for name in flatten(options)["models"] or () if name not in measured]:
            raise UserError(
                f"`--models` must not contain {', '.join(omitted)} for the implementations "
                f"{' and '.join(plan.implementations)}, which only neobert has. Add another "
                "implementation, or omit the model."
            )
        return plan

    def pairs(self) -> list[tuple[str, str]]:
        """Return the (model, implementation) pairs to measure."""
        return [
            (model, implementation)
            for model in self.models
            for implementation in self.implementations
            if model == "neobert" or implementation not in NEOBERT_ONLY
        ]


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all options, with the defaults of the device and the preset.

    Args:
        values: Values of the options, {name: value}; None if an option is not set.
    """
    import torch

    device = values["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    preset = values["preset"] or ("gpu" if on_gpu else "cpu")
    dtype = values["dtype"] or ("bfloat16" if on_gpu else "float32")
    values = {**values, "device": device, "preset": preset, "dtype": dtype}

    # Explicit options have priority over the preset.
    for name, value in PRESETS[preset].items():
        if values[name] is None:
            values[name] = value

    # A text file would have no effect without its workload.
    if values["texts"] is not None and "texts" not in values["sets"]:
        values["sets"] = [*values["sets"], "texts"]
    return values


def _check_values(values: dict[str, Any]) -> None:
    """Check that the device, the clock, the workloads and the tokenizer can be used.

    Args:
        values: Result of `_with_defaults`.

    Raises:
        UserError: If one of them cannot be used.
    """
    import torch

    device = values["device"]
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"`--device` must be cpu or cuda, got {device!r}.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"`--device` must be cpu on a machine without a GPU, got {device!r}.")
    if values["clock"] == "processor" and (device != "cpu" or values["threads"] != 1):
        raise UserError(
            "`--clock processor` counts the seconds of every thread. Add --device cpu --threads 1."
        )

    for workload in values["sets"]:
        check_workload(workload, values["texts"])
    if values["tokenizer"] is not None and values["texts"] is None:
        raise UserError(
            f"`--tokenizer` requires --texts, got {values['tokenizer']} without a file. Add "
            "--texts, or omit --tokenizer."
        )


OPTIONS = {
    "throughput": OptionParser(
        "neobert throughput",
        """Measure the throughput of the forward pass of NeoBERT and other encoders, in non-padding
tokens per second. The models take turns on every workload.

Workloads (--sets):
  512          sequences of 512 tokens, or of any other number
  normal-256   normal distribution of lengths: mean 256, standard deviation 64, 16 to 512 tokens
  normal-4096  normal distribution of lengths: mean 4,096, standard deviation 1,024, 16 to 8,192
               tokens
  short        log-normal distribution of lengths: median 48, sigma 0.7, 4 to 512 tokens
  fill-30      batches in which 30 % of the tokens are not padding, or any other percentage
  texts        the lengths of the texts in --texts

Implementations (--implementations):
  sdpa               attention of torch; NeoBERT packs padded batches, other models compute on
                     padding
  padded             NeoBERT without packing
  published          forward pass of the published code of NeoBERT
  compiled           sdpa with every block compiled
  flash_attention_2, flash_attention_3, flex_attention
                     other attention implementations
  ...-packed         batches are packed before the call
  ...-compiled       with every block compiled""",
        ThroughputOptions,
        "neobert throughput --preset cpu --output runs/throughput",
    ),
}
