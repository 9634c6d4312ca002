"""Options of `neobert pretrain`, `tokenizer` and `pseudo-perplexity`, with the paper's values
as defaults. Imports neither torch nor transformers."""

from dataclasses import dataclass
from typing import Literal

from ..common.arguments import Arguments, Options, check_values, option
from ..common.errors import UserError
from .pseudo_perplexity_options import PARSER as PSEUDO_PERPLEXITY_PARSER
from .tokenizer_options import PARSER as TOKENIZER_PARSER


@dataclass
class ModelArguments(Arguments):
    """What is trained."""

    model_config: dict | None = option(
        None, "fields of NeoBERTConfig that differ from the published model, as a mapping"
    )
    tokenizer: str | None = option(
        None, "folder or Hub name; default: that of init_from, or the bundled one", free=True
    )
    init_from: str | None = option(
        None,
        "start from these weights (stage 2): a run's output folder, one of its checkpoints, a raw "
        "checkpoint that neobert convert reads, a Hub folder or name",
        free=True,
    )
    init_embeddings: str | None = option(
        None,
        "with init_from and another tokenizer: rows of its vocabulary out of the old ones",
        choices=("transplant",),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.init_embeddings and (self.init_from is None or self.tokenizer is None):
            raise UserError(
                f"init_embeddings {self.init_embeddings} needs init_from, the weights to start "
                "from, and tokenizer, with the new vocabulary"
            )


@dataclass
class DataArguments(Arguments):
    """What it is trained on."""

    dataset: str | list = option(
        help=(
            "Hub name (name:subset@revision), or files, a folder or a pattern: txt, jsonl, "
            "parquet, a saved set; several as a list, also with weights: [{name: mine.jsonl, "
            "weight: 0.9}, {name: general.jsonl, weight: 0.1}]"
        ),
        free=True,  # known by its digest
    )
    split: str = option("train", "split of a Hub or saved data set")
    column: str = option("text", "column with the text")
    heldout: str | list | dict | None = option(
        None,
        "held-out text, as dataset, or several sets: {domain: a.jsonl, general: b.jsonl}; measured "
        "before the first step, every eval_steps and at the end",
        free=True,
    )
    streaming: bool | None = option(
        None,
        "read and tokenise while training, prepared set or not; default: yes for one Hub name "
        "without a prepared set",
    )
    prepared: str | None = option(
        None, "where the tokenised set is kept; default OUTPUT/prepared", free=True
    )
    prepare: bool = option(False, "tokenise the data and stop", free=True)
    measure: bool = option(
        False, "measure the held-out text with the weights of init_from and stop", free=True
    )

    def __post_init__(self):
        super().__post_init__()
        if self.measure and self.heldout is None:
            raise UserError("measure needs held-out text: give heldout")


@dataclass
class BatchArguments(Arguments):
    """In which batches, with which masks.

    Attributes:
        parts: ((least tokens of a text, probability), ...) of the mixture: each micro-batch comes
            from one of these parts.
    """

    max_length: int | Literal["auto"] = option(
        1024,
        "Maximum sequence length in tokens, including [CLS] and [SEP], at least 3. auto: context "
        "length of the model, at most 1024.",
    )
    long_texts: str = option(
        "truncate",
        "what happens to longer ones: truncate, or split into windows of max_length",
        choices=("truncate", "split"),
    )
    layout: str = option(
        "packed",
        "packed: nothing padded; packed_without_boundaries is ablation M6",
        choices=("packed", "packed_without_boundaries"),
    )
    texts_per_batch: int | None = option(None, "texts of a micro-batch on each device", least=1)
    tokens_per_batch: int | None = option(None, "or its tokens, at most", least=3)
    texts_per_step: int | None = option(
        None,
        "texts of an optimizer step over all devices; gradient_accumulation_steps then follows "
        "from the number of processes",
        least=1,
    )
    tokens_per_step: int | None = option(None, "or its tokens, at most", least=3)
    mixture: dict[int, float] | None = option(
        None,
        "{least tokens of a text: probability} that a batch is drawn from such texts (stage 2)",
    )
    mlm_probability: float = option(
        0.2, "share of the real tokens that are predicted", above=0, below=1
    )
    mask_replace_prob: float = option(
        1.0, "share of the predicted tokens that [MASK] replaces", least=0, most=1
    )
    random_replace_prob: float = option(
        0.0, "share of the predicted tokens that a random token replaces", least=0, most=1
    )
    mask_schedule: list[float] | None = option(
        None,
        "mlm_probability at the beginning and at the end, on a straight line between them",
        above=0,
        below=1,
    )

    def __post_init__(self):
        super().__post_init__()
        # The length that `auto` selects is checked when it is known.
        length = 3 if self.max_length == "auto" else self.max_length
        check_values({"max_length": length}, {"max_length": {"least": 3}})
        tokens = self.tokens_per_batch
        if tokens is None and self.texts_per_batch is None:
            self.texts_per_batch = 32
        self.parts = tuple((self.mixture or {0: 1.0}).items())
        shares = [share for _, share in self.parts]
        if min(shares) <= 0 or not abs(sum(shares) - 1) <= 1e-6:
            raise UserError(
                f"the mixture's probabilities must be above 0 and sum to 1, but {self.mixture} was "
                "given"
            )
        if tokens is not None and self.texts_per_batch is not None:
            raise UserError("give either tokens_per_batch or texts_per_batch")
        if tokens is not None and tokens < length:
            raise UserError(
                f"tokens_per_batch {tokens} is less than one text of max_length {length}; raise it "
                "or lower max_length"
            )
        if self.layout == "packed_without_boundaries" and (tokens is None or tokens % length):
            raise UserError(
                f"layout {self.layout} needs tokens_per_batch, a multiple of max_length {length}"
            )

    def accumulation(self, processes):
        """Micro-batches of an optimizer step on each device, or None where the recipe states no
        size of a step.

        Raises:
            UserError: the step is not a multiple of what `processes` devices take at once, or has
                another unit than the micro-batch.
        """
        unit, size = "texts", self.texts_per_batch
        step, other = self.texts_per_step, self.tokens_per_step
        if size is None:
            unit, size = "tokens", self.tokens_per_batch
            step, other = other, step
        if other is not None:
            raise UserError(
                f"a step and a micro-batch have one unit: with {unit}_per_batch give "
                f"{unit}_per_step"
            )
        if step is None:
            return None
        if step % (size * processes):
            raise UserError(
                f"{unit}_per_step {step:,} is not a multiple of {size:,} {unit} x {processes} "
                f"processes; give another {unit}_per_batch, "
                "or another number of processes"
            )
        return step // (size * processes)


@dataclass
class RunArguments(Arguments):
    """What else a run does."""

    output: str = option("runs/pretrain", "checkpoints, logs and the final model", free=True)
    keep_every: int = option(
        0,
        "beside the newest save_total_limit checkpoints keep every n-th step's; 0: none",
        free=True,
        least=0,
    )
    peak_tflops: float | None = option(
        None, "the device's peak; the log then has mfu", free=True, above=0
    )
    compile: bool = option(False, "torch.compile the blocks while training", free=True)
    # Trainer's own options, which accept "auto" here.
    learning_rate: float | Literal["auto"] = option(
        6e-4,
        "Peak learning rate. auto: 3e-4 for a hidden size of 768 or more, and inversely "
        "proportional to the hidden size below, a rate for continued pre-training.",
        free=True,  # part of the identity of a run as Trainer's option
    )
    bf16: bool | Literal["auto"] = option(
        False,
        "Autocast to bfloat16. auto: on accelerators that compute bfloat16, float32 elsewhere.",
        free=True,
    )


GROUPS = (ModelArguments, DataArguments, BatchArguments, RunArguments)


# Options of transformers' Trainer with the paper's values (section 4). Its warm-up of 2,000 steps
# is 5 % of the steps in a run of fewer than 40,000.
TRAINER = {
    "max_steps": 1_000_000,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "logging_steps": 100,
    "save_steps": 2000,
    "save_total_limit": 2,
    "report_to": "tensorboard",
}


OPTIONS = {
    "tokenizer": TOKENIZER_PARSER,
    "pretrain": Options(
        "neobert pretrain",
        "Masked-LM pre-training as in the paper (sections 3 and 4). The same command again "
        "continues from the last complete checkpoint.",
        GROUPS,
        "neobert pretrain recipes/example_small.yaml --dataset texts.txt --output runs/first",
        TRAINER,
    ),
    "pseudo-perplexity": PSEUDO_PERPLEXITY_PARSER,
}
