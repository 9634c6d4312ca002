"""Options of `neobert distill`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..common.constants import DTYPES, POOLINGS
from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP
from ..common.options import OptionGroup, OptionParser, option


# float8 is e5m2. `student.STORAGE_DTYPES` has the dtypes of torch.
StorageDtype = Literal["float32", "bfloat16", "float16", "float8"]


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Teacher, student and output directory."""

    title = "Model"

    teacher: str = option(
        help="Sentence encoder to learn from: a directory or a name on the Hub.", positional=True
    )
    output: str = option(
        help="Output directory of the student.", metavar="PATH", affects_results=False
    )
    init_from: str | None = option(
        None,
        "NeoBERT to start from instead of a new student: a directory or a name on the Hub.",
        metavar="NAME",
    )
    model_config: dict[str, Any] = option(
        default_factory=dict,
        help="Fields of NeoBERTConfig for a new student, which has the vocabulary of the teacher. "
        "By default the student has half of the teacher's layers and its hidden size.",
    )
    init_from_teacher: bool = option(
        False,
        "Train each block of a new student, in order, to reproduce a layer of the teacher before "
        "the distillation starts. The teacher must be a BERT with the hidden size and the number "
        "of heads of the student.",
    )
    teacher_layers: list[Annotated[int, Meta(ge=0)]] = option(
        default_factory=list,
        help="Layers of the teacher for --init-from-teacher, counted from 0, one per block of the "
        "student. By default the lowest and the highest ones, such as 0 1 4 5 of 6.",
    )
    transfer_steps: Annotated[int, Meta(ge=0)] = option(
        400,
        "Number of training steps per block with --init-from-teacher, in batches of about 2,048 "
        "tokens.",
    )
    teacher_dtype: Literal[DTYPES] = option(  # type: ignore[valid-type]
        "float32",
        "Precision of the teacher. auto depends on the machine, so it may differ when a run is "
        "resumed.",
    )
    trust_remote_code: bool = option(
        False, "Run the Python code in the repository of the teacher or of the student."
    )

    def __post_init__(self) -> None:
        # Imported late, because `--help` should not wait for transformers.
        from ..common.loading import check_model_fields

        if self.model_config and self.init_from:
            raise UserError(
                "`model_config` describes a new student, but `init_from` names an existing one. "
                "Remove one of them."
            )
        if self.init_from_teacher and self.init_from:
            raise UserError(
                "`init_from_teacher` initializes a new student, but `init_from` names an existing "
                "one. Remove one of them."
            )
        if self.teacher_layers and not self.init_from_teacher:
            raise UserError(
                "`teacher_layers` requires --init-from-teacher. Pass --init-from-teacher, or omit "
                "--teacher-layers."
            )
        check_model_fields(self.model_config, "model_config")


@dataclass(frozen=True)
class DataOptions(OptionGroup):
    """Training and validation data."""

    title = "Data"

    # Files of texts are identified by their content, so their paths do not affect the results.
    texts: list[str | dict[str, Any]] = option(
        help="Files of texts: .jsonl, .parquet, or .txt with one text per line. In a recipe also "
        "mappings with path, column, share (fraction of the rows to use), name and license.",
        metavar="PATH",
        affects_results=False,
    )
    validation_texts: list[str | dict[str, Any]] = option(
        default_factory=list,
        help="Additional files for evaluation only, for example from other domains.",
        metavar="PATH",
        affects_results=False,
    )
    validation_file: str | None = option(
        None,
        "File of pairs for evaluating the retrieval of the teacher, and of the student before and "
        "after training.",
        metavar="PATH",
        affects_results=False,
    )
    validation_percent: Annotated[float, Meta(gt=0, le=50)] | None = option(
        None,
        "Percentage of the texts held out for evaluation, selected by hash. By default 1, or for "
        "fewer than 10,000 texts the percentage of about 100 texts, at most 5.",
    )
    max_validation_texts: Annotated[int, Meta(ge=3)] = option(
        2000, "Maximum number of held-out texts, and of texts per file of --validation-texts."
    )
    work: str | None = option(
        None,
        "Directory for the embeddings of the teacher, which several runs may share. By default "
        "OUTPUT.work.",
        metavar="PATH",
        affects_results=False,
    )


@dataclass(frozen=True)
class StudentOptions(OptionGroup):
    """Architecture, initialization and storage of the student."""

    title = "Student"

    embeddings_from_teacher: bool | None = option(
        None,
        "Initialize the token embeddings so that their mean over a text approximates the teacher's "
        "embedding of the text. By default true for a new student without --init-from-teacher "
        "whose hidden size is at most the embedding dimension of the teacher.",
    )
    freeze_embeddings: bool = option(False, "Do not train the token embeddings.")
    pooling: Literal[POOLINGS] | None = option(  # type: ignore[valid-type]
        None, "Pooling of a student without a pooling module. (default: mean)"
    )
    max_length: Annotated[int, Meta(ge=3, le=2**31 - 1)] = option(
        128, "Maximum sequence length of both models in tokens."
    )
    dtype: StorageDtype = option("float32", "Dtype of the saved weights.")
    embedding_dtype: StorageDtype = option("float32", "Dtype of the saved token embeddings.")
    muon: bool = option(
        False,
        "Train the matrices of the blocks with Muon, and the other parameters with AdamW. Also "
        "applies to --init-from-teacher. Needs torch 2.9 or newer.",
    )
    compile: bool = option(
        False, "Compile the blocks with torch.compile for training.", affects_results=False
    )


@dataclass(frozen=True)
class LossOptions(OptionGroup):
    """Weights of the losses."""

    title = "Loss"

    cosine_weight: Annotated[float, Meta(ge=0)] = option(
        1.0, "Weight of 1 - cosine between the embeddings of student and teacher."
    )
    similarity_weight: Annotated[float, Meta(ge=0)] = option(
        0.5,
        "Weight of the KL divergence between the similarities of student and teacher within a "
        "batch.",
    )
    memory_bank_weight: Annotated[float, Meta(ge=0)] = option(
        1.0,
        "Weight of the KL divergence between the similarities of student and teacher to the memory "
        "bank.",
    )
    memory_bank_size: Annotated[int, Meta(ge=1)] = option(
        8192, "Number of training texts in the memory bank of teacher embeddings."
    )
    hidden_state_weight: Annotated[float, Meta(ge=0)] = option(
        0.0,
        "Weight of the relative squared error of the last hidden states of all tokens. The teacher "
        "then runs in every step, and must have the vocabulary and the hidden size of the student.",
    )
    similarity_temperature: Annotated[float, Meta(gt=0)] = option(
        0.05, "Temperature by which similarities are divided."
    )


@dataclass(frozen=True)
class CardOptions(OptionGroup):
    """Metadata of the model card."""

    title = "Model card"

    model_name: str | None = option(
        None,
        "Name of the student in its card. By default the name of the output directory.",
        metavar="TEXT",
        affects_results=False,
    )
    license: str = option("other", "License of the student.", metavar="NAME", affects_results=False)
    language: str = option("en", "Language of the texts.", metavar="NAME", affects_results=False)
    base_model: str | None = option(
        None,
        f"{BASE_MODEL_HELP.removesuffix('.')}. By default --init-from or the teacher, if it is a "
        "name on the Hub.",
        metavar="NAME",
        affects_results=False,
    )


@dataclass(frozen=True)
class DistillOptions:
    """Options of `neobert distill`."""

    model: ModelOptions
    data: DataOptions
    student: StudentOptions = StudentOptions()
    loss: LossOptions = LossOptions()
    card: CardOptions = CardOptions()
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model.init_from_teacher and self.student.embeddings_from_teacher:
            raise UserError(
                "`embeddings_from_teacher` and `init_from_teacher` initialize the token embeddings "
                "in different ways. Pass one of them."
            )

    @property
    def work_folder(self) -> Path:
        """Directory for the embeddings of the teacher."""
        return Path(self.data.work or f"{self.model.output.rstrip('/')}.work")


# Options of Trainer whose defaults differ.
TRAINER_DEFAULTS = {
    "per_device_train_batch_size": 64,
    "num_train_epochs": 3,
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
    "distill": OptionParser(
        "neobert distill",
        "Train a NeoBERT, the student, to reproduce the embeddings of another sentence encoder, "
        "the teacher. The texts need no labels.",
        DistillOptions,
        "neobert distill sentence-transformers/all-MiniLM-L6-v2 --texts texts.jsonl --output "
        "runs/student",
        TRAINER_DEFAULTS,
        trainer_help={
            "learning_rate": "Peak learning rate. By default 1e-5 times the square root of the "
            "number of optimizer steps, at most 1e-3.",
        },
    ),
}
