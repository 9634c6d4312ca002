"""Options of `neobert distill`."""

from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.constants import DTYPES, POOLINGS
from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP


STORAGE_DTYPES = ("float32", "bfloat16", "float16", "float8")  # float8 is e5m2


@dataclass(kw_only=True)
class TeacherOptions(Arguments):
    """What learns from what."""

    teacher: str = option(
        help="sentence encoder to learn from: a folder or a Hub name", positional=True
    )
    texts: list[str | dict] = option(
        help=(
            "files of texts, .jsonl, .parquet or .txt; in a recipe also mappings with path, "
            "column, name, license"
        ),
        free=True,  # known by their digests
    )
    output: str = option(help="folder of the student", free=True)
    model_config: dict = option(
        default_factory=dict,
        help="fields of NeoBERTConfig for a new student with the teacher's vocabulary; by default "
        "half of the teacher's layers and its hidden size",
    )
    init_from: str | None = option(
        None, "NeoBERT to start from instead of a new student: a folder or a Hub name"
    )
    other_texts: list[str | dict] = option(
        default_factory=list,
        help="files of text of another kind, which is only measured on",
        free=True,
    )
    heldout: str | None = option(
        None,
        "file of pairs to measure the retrieval of teacher, start and student on",
        free=True,
    )
    work: str | None = option(
        None, "folder for the teacher's vectors; by default OUTPUT.work", free=True
    )
    trust_remote_code: bool = option(
        False, "run the Python code that the teacher or the student brings"
    )


@dataclass(kw_only=True)
class StudentOptions(Arguments):
    """The student."""

    embeddings_from_teacher: bool | None = option(
        None,
        "initialize the student as the bag of words that is nearest to the teacher, by principal "
        "components if its hidden size is smaller; by default for a new student whose hidden size "
        "is at most the teacher's",
    )
    freeze_embeddings: bool = option(False, "do not train the token embeddings")
    pooling: str = option("mean", "of a student without one", choices=POOLINGS)
    max_length: int = option(128, "tokens of a text, for both models", least=3, most=2**31 - 1)
    dtype: str = option("float32", "of the saved weights", choices=STORAGE_DTYPES)
    embedding_dtype: str = option(
        "float32", "of the saved token embeddings", choices=STORAGE_DTYPES
    )


@dataclass(kw_only=True)
class AgreementOptions(Arguments):
    """The loss, and what agreement is measured on."""

    cosine_weight: float = option(1.0, "of 1 - cosine between the two vectors of a text", least=0)
    similarity_weight: float = option(
        0.5, "of the KL divergence between the similarities within a batch", least=0
    )
    bank_weight: float = option(
        1.0, "of the KL divergence between the similarities to stored texts", least=0
    )
    bank: int = option(
        8192, "number of stored texts, of which there are the teacher's vectors", least=1
    )
    similarity_temperature: float = option(0.05, "by which those cosines are divided", above=0)
    held_out_percent: float = option(
        1.0, "of the texts, by hash, to measure with", above=0, most=50
    )
    held_out_texts: int = option(
        2000, "at most so many of them, and of each of other_texts", least=3
    )


@dataclass(kw_only=True)
class TrainingOptions(Arguments):
    """How it trains."""

    teacher_dtype: str = option(
        "float32",
        "of the teacher's weights while its vectors are computed; auto may choose anew each time",
        choices=DTYPES,
    )
    compile: bool = option(False, "torch.compile the blocks while training", free=True)


@dataclass(kw_only=True)
class StudentCardOptions(Arguments):
    """What the card says."""

    title: str | None = option(None, "heading; by default the name of the output folder", free=True)
    license: str = option("other", "licence of the student", free=True)
    language: str = option("en", "language of the texts", free=True)
    base_model: str | None = option(
        None,
        f"{BASE_MODEL_HELP}; by default --init-from, else the teacher, where that is such a name",
        free=True,
    )


@dataclass(kw_only=True)
class DistillArguments(
    StudentCardOptions, TrainingOptions, AgreementOptions, StudentOptions, TeacherOptions
):
    """Options of `neobert distill`."""

    def __post_init__(self):
        from ..common.loading import check_model_fields

        super().__post_init__()
        if self.model_config and self.init_from:
            raise UserError(
                "`model_config` describes a new student, but `init_from` names an existing one. "
                "Remove one of them."
            )
        check_model_fields(self.model_config, "model_config")
        self.work = self.work or f"{self.output.rstrip('/')}.work"

    def sources(self):
        """`TextSource`s to learn from, and those of other kinds."""
        from .data import TextSource

        return [TextSource.from_entry(entry) for entry in self.texts], [
            TextSource.from_entry(entry) for entry in self.other_texts
        ]


# Trainer's options where `neobert distill` has other defaults.
DISTILL_TRAINER = {
    "per_device_train_batch_size": 64,
    "num_train_epochs": 3,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "logging_steps": 50,
    "save_steps": 500,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "ddp_find_unused_parameters": False,
    "report_to": "none",
    "seed": 0,
}


OPTIONS = {
    "distill": Options(
        "neobert distill",
        "A NeoBERT sentence encoder that learns the vectors of another one.",
        (DistillArguments,),
        "neobert distill sentence-transformers/all-MiniLM-L6-v2 recipes/distill.yaml --texts "
        "texts.jsonl --output runs/student",
        DISTILL_TRAINER,
    ),
}
