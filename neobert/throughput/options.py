"""Options of `neobert throughput`, with the models, implementations and presets. Imports neither
torch nor transformers."""

import re
from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.errors import UserError


MODELS = (
    "neobert",
    "bert-base",
    "bert-large",
    "roberta-base",
    "roberta-large",
    "modernbert-base",
    "modernbert-large",
)
# name: (attention implementation, layout of the batch, compiled, what it is)
IMPLEMENTATIONS = {
    "sdpa": (
        "sdpa",
        "own",
        False,
        "the model's own default; NeoBERT packs, the others compute on padding",
    ),
    "padded": ("sdpa", "padded", False, "NeoBERT with unpad_inputs=False"),
    "published": (
        "sdpa",
        "published",
        False,
        "NeoBERT as published: padded, additive mask expanded to (B, H, L, L)",
    ),
    "compiled": ("sdpa", "own", True, "as sdpa, every block compiled, with a dynamic token count"),
    "flash_attention_2": ("flash_attention_2", "own", False, "flash-attn 2"),
    "flash_attention_2-packed": (
        "flash_attention_2",
        "packed",
        False,
        "flash-attn 2, packed by the caller (no padding for the peers)",
    ),
    "flash_attention_2-compiled": (
        "flash_attention_2",
        "own",
        True,
        "flash-attn 2 under torch.compile",
    ),
    "flash_attention_3": ("flash_attention_3", "own", False, "flash-attn 3"),
    "flex_attention": ("flex_attention", "own", False, "flex_attention"),
}
NEOBERT_ONLY = ("padded", "published")

# What each preset sets where the command line does not. The CPU's takes minutes to hours, not days.
PRESETS = {
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


def check_set(name, texts=None):
    """Raises UserError unless `name` is a set; "texts" needs a file of them."""
    known = re.fullmatch(r"[1-9]\d*|fill-[1-9]\d?|normal-256|normal-4096|short", name)
    if not known and not (name == "texts" and texts):
        raise UserError(
            f"there is no set {name!r}; give a length such as 512, or normal-256, normal-4096, "
            "short, fill-30, or --texts with a text file"
        )


@dataclass(kw_only=True)
class ThroughputArguments(Arguments):
    """Options of `neobert throughput`."""

    output: str = option(help="a new folder for throughput.json and throughput.md")
    preset: str | None = option(
        None, "by default gpu where there is one, else cpu", choices=tuple(PRESETS)
    )
    models: list[str] | None = option(None, "what to compare", choices=MODELS)
    implementations: list[str] | None = option(
        None, "attention and layout", choices=tuple(IMPLEMENTATIONS)
    )
    sets: list[str] | None = option(None, "text lengths, see above")
    device: str | None = option(None, "cuda, cpu")
    dtype: str | None = option(
        None,
        "by default bfloat16 on GPUs, else float32",
        choices=("float32", "bfloat16", "float16"),
    )
    texts: str | None = option(
        None, "text file, one text a line, whose lengths make the set 'texts'"
    )
    tokenizer: str | None = option(None, "folder or name for --texts; by default the bundled one")
    batch: int | None = option(
        None,
        "texts a batch; by default as many as the two limits allow",
        least=1,
    )
    max_batch: int | None = option(None, "most texts of a batch", least=1)
    max_tokens: int | None = option(None, "most padded tokens of a batch", least=1)
    seed: int = option(0, "of the lengths and token ids", least=0)
    threads: int | None = option(None, "CPU threads", least=1)
    repeats: int | None = option(None, "timed repeats", least=1)
    warmup: int | None = option(None, "repeats before, not timed", least=1)
    clock: str = option(
        "wall",
        "processor: CPU seconds of this process, with --threads 1 on a machine in use",
        choices=("wall", "processor"),
    )
    layers: int | None = option(None, "cut every model to this many layers (a trial run)", least=1)

    def __post_init__(self):
        super().__post_init__()
        import torch

        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.preset = self.preset or ("gpu" if self.on_gpu else "cpu")
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.texts is not None and "texts" not in self.sets:
            self.sets = [*self.sets, "texts"]
        self.dtype = self.dtype or ("bfloat16" if self.on_gpu else "float32")
        if self.on_gpu and not torch.cuda.is_available():
            raise UserError("device cuda was given, but torch sees no GPU here; give --device cpu")
        if self.clock == "processor" and (self.device != "cpu" or self.threads != 1):
            raise UserError(
                "clock processor counts the seconds of every thread: give --device cpu --threads 1"
            )
        for name in self.sets:
            check_set(name, self.texts)

    @property
    def on_gpu(self):
        return self.device.startswith("cuda")

    def planned(self):
        """[(model, implementation)] to measure."""
        pairs = [(model, i) for model in self.models for i in self.implementations]
        return [(model, i) for model, i in pairs if model == "neobert" or i not in NEOBERT_ONLY]


OPTIONS = {
    "throughput": Options(
        "neobert throughput",
        """Measures the forward of NeoBERT and other encoders in real tokens a second, in turns, on sets of texts.

Sets: a number (texts of that length), normal-256 (256 +- 64, 16 to 512), normal-4096 (4,096 +- 1,024, 16 to 8,192), short (log-normal),
fill-30 (512 the longest, 30 % of the batch real; any percentage), and texts (the lengths of --texts FILE, one text a line).""",  # noqa: E501
        (ThroughputArguments,),
        "neobert throughput --preset cpu --output results/throughput_cpu",
    ),
}
