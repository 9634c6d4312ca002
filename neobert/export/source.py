"""What is exported: a Hub folder read once, with its model, its tokenizer, and how a
sentence-transformers folder pools."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from ..common.errors import UserError, listed, one_line, require
from ..common.files import read_json
from ..common.loading import load_tokenizer
from ..common.model_card import base_model_metadata, license_metadata, read_card
from ..common.pooling import pooling_mode
from ..configuration_neobert import NeoBERTConfig
from ..conversion.command import convert_checkpoint
from ..conversion.heads import Head, choose_head
from ..conversion.tokenizer import find_tokenizer, write_tokenizer
from .options import CardOptions, ModelOptions


_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Pooling:
    """How a folder of sentence-transformers makes one vector of a text.

    Attributes:
        mode: of `common.pooling`: "mean", "cls", "lasttoken", ...
        include_prompt: whether tokens of a prompt count.
        modules: of sentence-transformers: Pooling, then Dense and Normalize.
    """

    mode: str
    include_prompt: bool
    modules: tuple[nn.Module, ...]

    @property
    def dense(self):
        """The Dense modules."""
        return [module for module in self.modules if type(module).__name__ == "Dense"]

    @property
    def normalize(self):
        """Whether the vector is scaled to length 1."""
        return type(self.modules[-1]).__name__ == "Normalize"

    def __call__(self, hidden, mask):
        """(B, L, D) float32 and (B, L) of ones and zeros to (B, D)."""
        features = {"token_embeddings": hidden, "attention_mask": mask}
        for module in self.modules:
            features = module(features)
        return features["sentence_embedding"]


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        name: of the folder or checkpoint that was given.
        folder: of the weights, a Hub folder; temporary where a checkpoint was converted.
        head: which kind of model; `head.model_class` and `head.architectures` name its class.
        model: in float32, on the CPU, in eval mode, without the packing of padded batches.
        tokenizer: loaded from `tokenizer_folder`.
        tokenizer_folder: a clean copy of the tokenizer: tokenizer.json, tokenizer_config.json,
            special_tokens_map.json, and BERT's vocab.txt.
        pooling: of a folder of sentence-transformers; None for any other model.
        max_length: tokens of a text that are read.
        prompts: of a folder of sentence-transformers, {name: text}.
        known: what a card says of license and base model.
    """

    name: str
    folder: Path
    head: Head
    model: nn.Module
    tokenizer: object
    tokenizer_folder: Path
    pooling: Pooling | None
    max_length: int
    prompts: dict
    known: dict

    @property
    def config(self):
        return self.model.config

    def describe(self):
        """One line for the user."""
        pooled, layers = "", self.config.num_hidden_layers
        if self.pooling:
            pooled = f", {self.pooling.mode} pooling"
            pooled += ", Dense" if self.pooling.dense else ""
            pooled += ", length 1" if self.pooling.normalize else ""
        return (
            f"{self.name}: {self.head.class_name}, {layers} layers of {self.config.hidden_size}"
            f"{pooled}, texts of up to {self.max_length:,} tokens"
        )


def _is_hub_folder(folder):
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in (_WEIGHTS, _INDEX)
    )


@contextlib.contextmanager
def open_source(options: ModelOptions, card: CardOptions | None = None) -> Iterator[Source]:
    """Load the model to export.

    Yields:
        The model; its temporary directories exist until the context ends.

    Raises:
        UserError: If the model cannot be read, is not a NeoBERT, or its parts do not fit.
    """
    model_path = Path(options.folder)
    if not model_path.exists():
        raise UserError(
            f"there is no {model_path}. Download a model of the Hub first: hf download USER/NAME "
            "--local-dir FOLDER."
        )
    with tempfile.TemporaryDirectory(prefix="neobert-export-") as scratch_name:
        scratch = Path(scratch_name)
        modules = _read_modules(model_path)
        folder = model_path / modules[0]["path"] if modules else model_path
        if not _is_hub_folder(folder):
            if modules or (model_path / "adapter_config.json").is_file():
                raise UserError(
                    f"{folder} has no config.json with {_WEIGHTS}. Merge an adapter into its "
                    "model first (`merge_and_unload`)."
                )
            folder = scratch / "converted"
            convert_checkpoint(model_path, folder, head=options.head, tokenizer=options.tokenizer)
        yield _read(options, card or CardOptions(), folder, modules, scratch)


def _read_modules(folder: Path) -> list[dict[str, str]]:
    """Return the modules of modules.json as [{"path", "kind"}], or []."""
    if not (folder / "modules.json").is_file():
        return []
    modules = [
        {"path": module["path"], "kind": module["type"].rpartition(".")[2]}
        for module in read_json(folder / "modules.json")
    ]
    kinds = [module["kind"] for module in modules]
    are_known = kinds[:2] == ["Transformer", "Pooling"] and {*kinds[2:]} <= {"Dense", "Normalize"}
    if not are_known or "Normalize" in kinds[:-1]:
        raise UserError(
            f"{folder} must have the modules Transformer, Pooling, then any Dense, and Normalize "
            f"last, got {', '.join(kinds)}."
        )
    return modules


def _read_pooling(folder, modules):
    """The Pooling of a folder of sentence-transformers."""
    require("eval", "sentence_transformers")
    from sentence_transformers import models

    config = read_json(folder / modules[1]["path"] / "config.json")
    loaded = []
    for module in modules[1:]:
        if module["kind"] == "Normalize":
            loaded.append(models.Normalize())
        else:
            loaded.append(getattr(models, module["kind"]).load(str(folder / module["path"])))
        loaded[-1].requires_grad_(False)
    return Pooling(pooling_mode(config), config.get("include_prompt", True), tuple(loaded))


def _tensor_names(folder):
    if (folder / _INDEX).is_file():
        return list(read_json(folder / _INDEX)["weight_map"])
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        return list(file.keys())


def _read(
    options: ModelOptions,
    card: CardOptions,
    folder: Path,
    modules: list[dict[str, str]],
    scratch: Path,
) -> Source:
    """Load a Hub folder."""
    model_path = Path(options.folder)
    try:
        fields = read_json(folder / "config.json")
        if fields.get("model_type") != "neobert":
            raise UserError(f"{folder} must be a NeoBERT, got a {fields.get('model_type')} model.")
        config = NeoBERTConfig.from_pretrained(folder)
        head, _ = choose_head(
            _tensor_names(folder),
            options.head or ("base" if modules else None),
            config.architectures or (),
        )
        if head.has_choices:
            raise UserError("multiple-choice models cannot be exported: no engine supports them.")
        model, report = head.model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        lacking = sorted(str(name) for name in report["missing_keys"])
        if lacking:
            raise UserError(f"{folder} lacks tensors of {head.class_name}: {listed(lacking, 5)}.")
    except UserError:
        raise
    except Exception as error:  # damaged files of any kind
        raise UserError(f"the model in {folder} cannot be loaded: {one_line(error)}.") from error
    model.config.unpad_inputs = False
    model.eval().requires_grad_(False)
    own = folder / "sentence_bert_config.json"
    read = read_json(own).get("max_seq_length") if own.is_file() else None
    longest = min(read or config.context_length, config.context_length)
    tokenizer_folder = scratch / "written-tokenizer"
    tokenizer_folder.mkdir()
    tokenizer_source = find_tokenizer(options.tokenizer, [folder])
    if tokenizer_source is None:
        raise UserError(
            "`--tokenizer` must be a directory, got none. An export contains its tokenizer."
        )
    write_tokenizer(tokenizer_source, tokenizer_folder, config.vocab_size, longest)
    tokenizer = load_tokenizer(tokenizer_folder)
    further = model_path / "config_sentence_transformers.json"
    prompts = (read_json(further).get("prompts") or {}) if modules and further.is_file() else {}
    pooling = _read_pooling(model_path, modules) if modules and head.option == "base" else None
    return Source(
        model_path.name or str(model_path),
        folder,
        head,
        model,
        tokenizer,
        tokenizer_folder,
        pooling,
        min(longest, tokenizer.model_max_length),
        prompts,
        license_metadata(card.license, read_card(model_path))
        | base_model_metadata(card.base_model, relation="quantized"),
    )
