"""Options of `neobert contrastive`."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..common.arguments import Arguments, Options, option
from ..common.errors import UserError, listed
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..embeddings.instructions import TEMPLATE, check_template, read_instructions
from ..embeddings.options import EncoderOptions
from ..training.lora import LoraOptions


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
        """The `PairSource`s, each with its instruction and the columns of its negatives."""
        from .data import PairSource, with_negatives

        sources = [PairSource.from_dict(entry) for entry in self.datasets]
        for path in self.pairs:
            name = Path(path).name.split(".")[0]
            sources.append(PairSource(name=name, path=path, instruction=self.instruction))
        names = [source.name for source in sources]
        if not sources or len(set(names)) < len(names):
            raise UserError(
                "give data sets of different names, in a recipe (neobert contrastive "
                f"recipes/contrastive.yaml) or as --pairs FILE, but {listed(names) or 'none'} "
                "was given"
            )
        if self.instructions is not None:
            texts = read_instructions(self.instructions, names)
            if lacking := [name for name in names if name not in texts]:
                raise UserError(
                    f"{self.instructions} has no instruction for {listed(lacking)}; give every "
                    "data set one, '' for none"
                )
            sources = [replace(source, instruction=texts[source.name]) for source in sources]
        return [with_negatives(source) for source in sources]

    def loading(self):
        """How `load_sentence_transformer` loads it."""
        from sentence_transformers.util import is_sentence_transformer_model

        length = self.max_length
        if length is None and not is_sentence_transformer_model(self.model):
            length = LENGTH
        return {**super().loading(), "max_length": length}


# Trainer's options with other defaults than Trainer's: those of the authors' code. `parse` adds one
# epoch and the learning rate of the model.
CONTRASTIVE_TRAINER = {
    "per_device_train_batch_size": 64,
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


OPTIONS = {
    "contrastive": Options(
        "neobert contrastive",
        "Contrastive fine-tuning of an encoder to a sentence encoder (paper, section 4.3): "
        "InfoNCE with in-batch and hard negatives.",
        (ContrastiveArguments,),
        "neobert contrastive --model chandar-lab/NeoBERT --pairs train.jsonl --heldout test.jsonl "
        "--output runs/encoder",
        CONTRASTIVE_TRAINER,
    ),
}
