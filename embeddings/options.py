"""Options of `neobert encode`, `contrastive`, `distill`, `retrieval` and `mteb`, by topic. Imports
neither torch nor transformers."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..common.arguments import Arguments, Options, option
from ..common.cards import BASE_MODEL_HELP, LICENSE_HELP
from ..common.constants import CPU_TOKENS, CUDA_TOKENS, DTYPES, POOLINGS
from ..common.errors import UserError, listed
from ..common.lora import LoraOptions
from .instructions import TEMPLATE, check_template, read_instructions


FORMATS = ("parquet", "safetensors")
PAPER_BENCHMARK = "MTEB(eng, v1)"
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


# ------------------------------------------------------------------------------------------------
# encode


@dataclass(kw_only=True)
class CorpusOptions(Arguments):
    """What is encoded, by which model."""

    source: str = option(
        help=(
            "a file with a text column (.jsonl, .parquet, .csv, .tsv, .txt), or a folder of "
            "such files"
        ),
        positional=True,
        free=True,
    )
    output: str = option(
        help="a file (.parquet or .safetensors), or a folder of parts", positional=True, free=True
    )
    model: str = option(help="sentence encoder or bare encoder: a folder or a Hub name")
    text_column: str = option("text", "column that holds the text")
    prompt_name: str | None = option(
        None, "name of one of the model's prompts to put before each text"
    )
    prompt: str | None = option(None, "text to put before each text")


@dataclass(kw_only=True)
class LongTextOptions(Arguments):
    """What is done with texts that are longer than the model reads."""

    long_texts: str = option(
        "cut",
        "cut: a vector a text, of its beginning; windows: a vector for each part of a text",
        choices=("cut", "windows"),
    )
    window: int | None = option(
        None, "most tokens of a window; 256, or as many as the model reads if less", least=1
    )
    overlap: int | None = option(
        None, "most tokens that neighbouring windows share; an eighth of a window", least=0
    )
    late: bool = option(
        False, "windows are the means over their tokens from one pass over the document"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.long_texts == "cut":
            for name in ("window", "overlap", "late"):
                if (value := getattr(self, name)) is not None and value is not False:
                    raise UserError(f"{name} is for windows; give long_texts windows too")


@dataclass(kw_only=True)
class VectorOptions(Arguments):
    """What is written."""

    keep: list[str] | None = option(
        None, "columns to copy to a parquet output; 'id' where there is one"
    )
    format: str = option("parquet", "of the parts, where OUTPUT is a folder", choices=FORMATS)
    normalize: bool = option(False, "scale the vectors to length 1")
    output_dtype: str = option(
        "float32", "of the vectors in the output", choices=("float32", "float16")
    )
    overwrite: bool = option(
        False,
        "make OUTPUT anew where neobert encode wrote it; any other file is left alone",
        free=True,
    )
    append: bool = option(
        False, "add the texts to a finished OUTPUT of the same model, prompt and settings"
    )


@dataclass(kw_only=True)
class WorkOptions(Arguments):
    """How the work is done and shared out."""

    dtype: str = option(
        "auto",
        "of the model; auto takes the fastest of floating point by a measurement, int8 is for "
        "NeoBERT on a CPU",
        choices=DTYPES,
    )
    device: str | None = option(
        None, "cpu, cuda, cuda:1, ...; GPUs are shared out among the processes", free=True
    )
    processes: int | None = option(
        None,
        "worker processes; by default one a GPU, or one; one a rank under a launcher",
        free=True,
        least=1,
    )
    tokens_per_batch: int | None = option(None, TOKENS_HELP, free=True, least=1)
    shard_rows: int = option(8192, "most rows in a part", least=1)
    shard_characters: int = option(
        32_000_000, "most characters in a part; a longer text is a part of its own", least=1
    )


@dataclass(kw_only=True)
class EncodeArguments(WorkOptions, EncoderOptions, LongTextOptions, VectorOptions, CorpusOptions):
    """Options of `neobert encode`."""

    def __post_init__(self):
        super().__post_init__()
        if self.append and self.overwrite:
            raise UserError("give either append or overwrite, not both")
        if self.prompt is not None and self.prompt_name is not None:
            raise UserError("give either prompt or prompt_name, not both")


# ------------------------------------------------------------------------------------------------
# contrastive


LENGTH = 1024  # tokens of a text, for a bare encoder: that of the authors' code


@dataclass(kw_only=True)
class PairsOptions(Arguments):
    """What is trained on what."""

    model: str = option(help="encoder to start from: a folder or a Hub name")
    output: str = option(help="folder of the sentence encoder", free=True)
    pairs: list[str] = option(
        default_factory=list,
        help="files of rows with columns anchor, positive, negative, negative_1, ...",
    )
    heldout: str | None = option(
        None,
        "file of pairs to measure retrieval on, before and after the training; never trained on",
        free=True,
    )
    datasets: list[dict] = option(
        default_factory=list, help="data sets (see contrastive_data.PairSource); in a YAML recipe"
    )


@dataclass(kw_only=True)
class InstructionOptions(Arguments):
    """Instructions before the queries."""

    instruction: str = option("", "instruction before the anchors of --pairs")
    instructions: str | None = option(
        None, "YAML or JSON file {data set: instruction}, in place of those of the recipe"
    )
    instruction_template: str = option(TEMPLATE, "how an instruction is put before a query")

    def __post_init__(self):
        super().__post_init__()
        check_template(self.instruction_template)


@dataclass(kw_only=True)
class LossOptions(Arguments):
    """The loss and its batches."""

    temperature: float = option(0.07, "the cosine similarity is divided by this", above=0)
    alpha: float = option(
        0.5,
        "a batch's data set is drawn with probability proportional to size^alpha",
        least=0,
        most=10,
    )
    texts_per_batch: int | None = option(
        None, "texts in a batch over all columns, in place of the batch size", least=1
    )
    mini_batch_size: int | None = option(
        None, "gradient caching: texts at a time, for batches that do not fit", least=1
    )
    gather_negatives: bool = option(False, "the texts of all processes are negatives of each other")


@dataclass(kw_only=True)
class CardOptions(Arguments):
    """What the card says."""

    license: str | None = option(None, LICENSE_HELP, free=True)
    base_model: str | None = option(None, BASE_MODEL_HELP, free=True)


@dataclass(kw_only=True)
class ContrastiveArguments(
    CardOptions, LoraOptions, LossOptions, InstructionOptions, EncoderOptions, PairsOptions
):
    """Options of `neobert contrastive`."""

    max_length: int | None = option(
        None,
        f"tokens per text; by default a sentence encoder's own limit, and {LENGTH:,} for a bare "
        "encoder",
        least=3,
        most=2**31 - 1,
    )

    def sources(self):
        """The `PairSource`s, each with its instruction. Local files are read completely, and so
        checked."""
        from .contrastive_data import PairSource, inspected

        sources = [PairSource.from_dict(entry) for entry in self.datasets]
        sources += [PairSource.from_file(path, self.instruction) for path in self.pairs]
        if not sources:
            raise UserError(
                "no training data: give datasets in a recipe (neobert contrastive "
                "recipes/contrastive.yaml) or --pairs FILE"
            )
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two data sets are called {name!r}; names must differ")
        return [inspected(source) for source in self._instructed(sources, names)]

    def _instructed(self, sources, names):
        """`sources` with the instructions of the file."""
        if self.instructions is None:
            return sources
        texts = read_instructions(self.instructions, names)
        if lacking := [name for name in names if name not in texts]:
            raise UserError(
                f"{self.instructions} has no instruction for {listed(lacking)}; give every data "
                "set one, '' for none"
            )
        return [source.replaced(instruction=texts[source.name]) for source in sources]

    def processes_together(self, training):
        """Number of processes whose batches share their negatives."""
        return training.world_size if self.gather_negatives else 1

    def loading(self):
        """The arguments of `load_sentence_transformer`."""
        from .packed_encoder import is_sentence_transformer

        names = ("pooling", "tokenizer", "attn_implementation", "trust_remote_code")
        length = self.max_length or (None if is_sentence_transformer(self.model) else LENGTH)
        return {
            "model": self.model,
            "max_length": length,
            **{name: getattr(self, name) for name in names},
        }


# Trainer's options with other defaults than Trainer's: those of the authors' code. The warm-up is 5
# % of the steps.
CONTRASTIVE_TRAINER = {
    "max_steps": 2000,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "logging_steps": 20,
    "save_steps": 500,
    "save_total_limit": 2,
    "report_to": "none",
    "logging_nan_inf_filter": False,
    "seed": 42,
}


# ------------------------------------------------------------------------------------------------
# distill


STORAGE_DTYPES = ("float32", "bfloat16", "float16", "float8")  # float8 is e5m2


@dataclass(kw_only=True)
class TeacherOptions(Arguments):
    """What learns from what."""

    teacher: str = option(
        help="sentence encoder to learn from: a folder or a Hub name", positional=True
    )
    texts: list[str | dict] = option(
        default_factory=list,
        help=(
            "required: files of texts, .jsonl, .parquet or .txt; in a recipe also mappings "
            "with path, column, name, license"
        ),
        free=True,  # known by their digests
    )
    output: str | None = option(None, "required: folder of the student", free=True)
    model_config: dict = option(
        default_factory=dict,
        help="fields of NeoBERTConfig for a new student; the vocabulary is the teacher's",
    )
    init_from: str | None = option(
        None, "a NeoBERT to start from, in place of model_config: a folder or a Hub name"
    )
    other_texts: list[str | dict] = option(
        default_factory=list,
        help="files of text of another kind, which is only measured on",
        free=True,
    )
    work: str | None = option(
        None, "folder for the teacher's vectors and checkpoints; by default OUTPUT.work", free=True
    )
    trust_remote_code: bool = option(
        False, "run the Python code that the teacher or the student brings"
    )


@dataclass(kw_only=True)
class StudentOptions(Arguments):
    """The student."""

    embeddings_from_teacher: bool = option(
        False, "start from the teacher's token embeddings, by PCA where the student is narrower"
    )
    freeze_embeddings: bool = option(False, "do not train the token embeddings")
    added_blocks: int = option(
        0, "blocks to append to init_from; at the start they change nothing", least=0
    )
    pooling: str = option("mean", "of a student without one", choices=POOLINGS)
    max_length: int = option(128, "tokens of a text, for both models", least=3, most=2**31 - 1)
    keep_projection: bool = option(
        True,
        "where the widths differ: whether the linear map to the teacher's width stays, as a Dense "
        "module",
    )
    dtype: str = option("float32", "of the saved weights", choices=STORAGE_DTYPES)
    embedding_dtype: str = option(
        "float32", "of the saved token embeddings", choices=STORAGE_DTYPES
    )


@dataclass(kw_only=True)
class AgreementOptions(Arguments):
    """The loss, and what agreement is measured on."""

    cosine_weight: float = option(1.0, "of 1 - cosine between the two vectors of a text", least=0)
    mse_weight: float = option(
        0.0, "of the mean squared error between the two vectors of a text", least=0
    )
    similarity_weight: float = option(
        1.0, "of the KL divergence between the similarities within a batch", least=0
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
        "auto",
        "of the teacher's weights while its vectors are computed; int8 for a NeoBERT on a CPU",
        choices=DTYPES,
    )
    neighbours: int = option(
        0,
        "units (texts, or pairs) in the same batch as one to which the teacher finds them nearest",
        least=0,
    )
    attn_implementation: str | None = option(None, "attention implementation while training")
    compile: bool = option(False, "torch.compile the blocks while training", free=True)
    device: str | None = option(None, "cpu, cuda or cuda:N; by default the first GPU, or the CPU")


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
        from ..common.model_fields import check_model_fields

        super().__post_init__()
        if not self.texts:
            raise UserError(
                "there are no texts to learn from: give texts in the recipe, or --texts FILE"
            )
        if not self.output:
            raise UserError("give --output, the folder for the student")
        if bool(self.model_config) == bool(self.init_from):
            raise UserError(
                "give either model_config, for a new student, or --init-from, a NeoBERT to start "
                "from"
            )
        if self.added_blocks and not self.init_from:
            raise UserError("added_blocks is for --init-from; a new student has num_hidden_layers")
        check_model_fields(self.model_config, "model_config")
        if not (self.cosine_weight or self.mse_weight or self.similarity_weight):
            raise UserError(
                "at least one of cosine_weight, mse_weight and similarity_weight must be above 0"
            )
        self.work = self.work or f"{self.output.rstrip('/')}.work"

    def sources(self):
        """`TextSource`s to learn from, and those of other kinds."""
        from .distill_data import TextSource

        return [TextSource.from_entry(entry) for entry in self.texts], [
            TextSource.from_entry(entry) for entry in self.other_texts
        ]


# Trainer's options where `neobert distill` has other defaults.
DISTILL_TRAINER = {
    "per_device_train_batch_size": 256,
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 200,
    "logging_steps": 50,
    "save_steps": 500,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "ddp_find_unused_parameters": False,
    "report_to": "none",
    "seed": 0,
}


# ------------------------------------------------------------------------------------------------
# retrieval and mteb


@dataclass(kw_only=True)
class QuestionOptions(Arguments):
    """What is measured on what."""

    model: str = option(
        help="sentence encoder or bare encoder: a folder or a Hub name", positional=True
    )
    pairs: str = option(
        help="file of rows with columns anchor, positive, and perhaps negative, negative_1, ..."
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ...")


@dataclass(kw_only=True)
class RetrievalArguments(EncoderOptions, QuestionOptions):
    """Options of `neobert retrieval`."""


@dataclass(kw_only=True)
class TaskOptions(Arguments):
    """What is measured on what."""

    model: str = option(help="sentence encoder or bare encoder: a folder or a Hub name")
    output: str = option(help="folder for <name>.json, the tables and MTEB's result cache")
    tasks: list[str] = option(
        default_factory=lambda: [PAPER_BENCHMARK],
        help="task names and benchmark names",
    )
    name: str | None = option(None, "name of the row; the model's by default")
    instructions: str = option(
        "mteb", "mteb (each task's own prompt), none, or a YAML or JSON file {task or type: text}"
    )
    instruction_template: str = option(TEMPLATE, "how an instruction is put before a text")
    dtype: str = option(
        "auto",
        "float16 on CUDA, as in the paper; elsewhere auto takes the fastest of floating point by a "
        "measurement; int8 is for NeoBERT on a CPU",
        choices=DTYPES,
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, ...")
    tokens_per_batch: int | None = option(None, TOKENS_HELP, least=1)
    stop_on_error: bool = option(
        False, "stop at the first task that fails, rather than after the others"
    )


@dataclass(kw_only=True)
class MtebArguments(EncoderOptions, TaskOptions):
    """Options of `neobert mteb`."""

    def __post_init__(self):
        super().__post_init__()
        check_template(self.instruction_template)
        if not self.tasks:
            raise UserError("no task was given; give names, or a benchmark such as 'MTEB(eng, v1)'")
        if not re.fullmatch(r"[\w.+-]+", self.row):
            raise UserError(
                f"name may hold letters, digits and . _ + -, but {self.row!r} was given"
            )

    @property
    def row(self):
        """Name of the row in the table."""
        return self.name or Path(self.model.rstrip("/")).name


# ------------------------------------------------------------------------------------------------
# the table


OPTIONS = {
    "encode": Options(
        "neobert encode",
        "Embeddings of a corpus of any size, in constant memory, by several processes, GPUs or "
        "machines. An interrupted run continues.",
        (EncodeArguments,),
        "neobert encode texts.jsonl vectors.parquet --model examples/sentence-encoder",
    ),
    "contrastive": Options(
        "neobert contrastive",
        "Contrastive fine-tuning of an encoder to a sentence encoder (paper, section 4.3): "
        "InfoNCE with in-batch and hard negatives.",
        (ContrastiveArguments,),
        "neobert contrastive --model chandar-lab/NeoBERT --pairs train.jsonl --heldout test.jsonl "
        "--output runs/encoder",
        CONTRASTIVE_TRAINER,
    ),
    "distill": Options(
        "neobert distill",
        "A NeoBERT sentence encoder that learns the vectors of another one.",
        (DistillArguments,),
        "neobert distill sentence-transformers/all-MiniLM-L6-v2 recipes/distill.yaml --texts "
        "texts.jsonl --output runs/student",
        DISTILL_TRAINER,
    ),
    "retrieval": Options(
        "neobert retrieval",
        "How often an encoder finds the text that belongs to a question, among all texts of a "
        "file.",
        (RetrievalArguments,),
        "neobert retrieval runs/encoder --pairs test.jsonl",
    ),
    "mteb": Options(
        "neobert mteb",
        "MTEB through the mteb package, packed and resumable, and its table in the layout of the "
        "paper's Table 4.",
        (MtebArguments,),
        "neobert mteb --model runs/encoder --tasks STS12 --output results/mteb",
    ),
}
