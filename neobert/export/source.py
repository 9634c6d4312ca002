"""Model to export: a Hub folder with its tokenizer, and the pooling of sentence-transformers."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common.errors import UserError, listed, one_line, require
from ..common.files import read_json
from ..common.loading import WEIGHTS, WEIGHTS_INDEX, load_tokenizer, tensor_names
from ..common.model_card import base_model_metadata, license_metadata, read_card
from ..common.sentence_transformers_files import pooling_mode
from ..configuration_neobert import NeoBERTConfig
from ..conversion.command import convert
from ..conversion.heads import Head, HeadName, choose_head
from ..conversion.options import CheckpointOptions, ConvertOptions
from ..conversion.tokenizer import find_tokenizer, write_tokenizer
from .options import CardOptions, ModelOptions


@dataclass(frozen=True)
class Pooling:
    """Modules of sentence-transformers that turn hidden states into one embedding per text.

    Attributes:
        mode: Pooling mode, see `write_pooling`: "mean", "cls", "lasttoken", ...
        include_prompt: Whether the tokens of a prompt are included.
        modules: Modules of sentence-transformers: Pooling, then Dense and Normalize.
        truncate_dim: Number of values of an embedding that are kept, or None for all.
    """

    mode: str
    include_prompt: bool
    modules: tuple[nn.Module, ...]
    truncate_dim: int | None = None

    @property
    def dense(self) -> list[nn.Module]:
        """Dense modules."""
        return [module for module in self.modules if type(module).__name__ == "Dense"]

    @property
    def normalize(self) -> bool:
        """Whether embeddings are normalized to length 1."""
        return type(self.modules[-1]).__name__ == "Normalize"

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of texts.

        Args:
            hidden: Hidden states, float32 of shape (B, L, D).
            mask: Attention mask of ones and zeros, shape (B, L).

        Returns:
            Embeddings of shape (B, D), or (B, `truncate_dim`).
        """
        # Modules of sentence-transformers read a dictionary and add their outputs to it.
        features = {"token_embeddings": hidden, "attention_mask": mask}
        for module in self.modules:
            features = module(features)
        # sentence-transformers truncates embeddings after all modules.
        return features["sentence_embedding"][:, : self.truncate_dim]


@dataclass(frozen=True)
class SourceModel:
    """Model to export.

    Attributes:
        name: Name of the folder or checkpoint.
        folder: Hub folder with the weights, temporary if a checkpoint was converted.
        head: Head of the model.
        model: Model in float32 on the CPU, in evaluation mode, which does not unpad its inputs.
        tokenizer: Fast tokenizer of transformers.
        tokenizer_folder: Directory with the files of the tokenizer: tokenizer.json,
            tokenizer_config.json, special_tokens_map.json, and vocab.txt for that of BERT.
        pooling: Pooling of a folder of sentence-transformers, else None.
        max_length: Maximum sequence length in tokens.
        prompts: Prompts of a folder of sentence-transformers, by name.
        default_prompt_name: Name of the default prompt of such a folder, if any.
        similarity_fn_name: Name of the similarity function of such a folder, if any.
        metadata: License and base model, for the model card.
    """

    name: str
    folder: Path
    head: Head
    model: nn.Module
    tokenizer: Any
    tokenizer_folder: Path
    pooling: Pooling | None
    max_length: int
    prompts: dict[str, str]
    metadata: dict[str, str]
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config

    @property
    def default_prompt(self) -> str:
        """Prompt that sentence-transformers prepends to texts by default, or an empty string."""
        return self.prompts.get(self.default_prompt_name or "", "")

    def client_settings(self) -> list[str]:
        """Return the settings that only sentence-transformers applies, as instructions to users."""
        settings = []
        if self.default_prompt:
            settings.append(f"Prepend the default prompt {self.default_prompt!r} to each text.")
        if self.pooling and self.pooling.truncate_dim:
            settings.append(f"Truncate embeddings to {self.pooling.truncate_dim:,} dimensions.")
        return settings

    def describe(self) -> str:
        """Return one line about the model, for the user."""
        pooling = ""
        if self.pooling:
            pooling = f", {self.pooling.mode} pooling"
            if self.pooling.dense:
                pooling += ", Dense"
            if self.pooling.normalize:
                pooling += ", normalized"
            if self.pooling.truncate_dim:
                pooling += f", truncated to {self.pooling.truncate_dim:,} dimensions"
            if self.default_prompt:
                pooling += f", default prompt {self.default_prompt!r}"
        layers = f"{self.config.num_hidden_layers} layers of {self.config.hidden_size}"
        return (
            f"{self.name}: {self.head.class_name}, {layers}{pooling}, texts of up to "
            f"{self.max_length:,} tokens"
        )


@dataclass(frozen=True)
class _Module:
    """Entry of modules.json: directory of a module, and the name of its class."""

    path: str
    class_name: str


@contextlib.contextmanager
def open_source(options: ModelOptions, card: CardOptions | None = None) -> Iterator[SourceModel]:
    """Load the model to export.

    Args:
        options: Model and tokenizer.
        card: Metadata of the model card.

    Yields:
        The model. Its temporary directories exist until the context ends.

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
        modules = _read_modules(model_path, options.head)
        # A model of sentence-transformers may have its transformer in a subdirectory.
        folder = model_path / modules[0].path if modules else model_path
        # Without a pooling, the transformer is exported with its head.
        modules = modules if len(modules) > 1 else []
        if not _is_hub_folder(folder):
            if modules or (model_path / "adapter_config.json").is_file():
                raise UserError(
                    f"{folder} has no config.json with {WEIGHTS}. Merge an adapter into its "
                    "model first (`merge_and_unload`)."
                )
            # Everything else must be a raw training checkpoint, which is converted first.
            folder = scratch / "converted"
            checkpoint = CheckpointOptions(
                str(model_path), str(folder), head=options.head, tokenizer=options.tokenizer
            )
            convert(ConvertOptions(checkpoint), report=False)

        yield _load_source(options, card or CardOptions(), folder, modules, scratch)


def _is_hub_folder(folder: Path) -> bool:
    """Return whether a directory contains a configuration and safetensors weights."""
    has_weights = (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()
    return has_weights and (folder / "config.json").is_file()


def _read_modules(folder: Path, head: HeadName | None) -> list[_Module]:
    """Return the modules of modules.json, or an empty list without this file.

    Args:
        folder: Directory of the model.
        head: Value of `--head`, or None.

    Returns:
        The transformer and the modules that turn its hidden states into an embedding; only the
        transformer for a CrossEncoder, and for a head whose outputs are not hidden states.

    Raises:
        UserError: If a module is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    # The class is the last part of a path such as sentence_transformers.models.Pooling.
    modules = [
        _Module(module["path"], module["type"].rpartition(".")[2]) for module in read_json(path)
    ]
    names = [module.class_name for module in modules]
    has_other_outputs = names == ["Transformer"] or head not in (None, "base")
    if has_other_outputs and names[:1] == ["Transformer"]:
        return modules[:1]

    # The graphs contain these modules; others, such as LayerNorm, would be lost silently.
    are_known = names[:2] == ["Transformer", "Pooling"] and {*names[2:]} <= {"Dense", "Normalize"}
    if not are_known or "Normalize" in names[:-1]:
        raise UserError(
            f"{folder} must have the modules Transformer, Pooling, then any Dense, and Normalize "
            f"last, got {', '.join(names)}."
        )
    return modules


def _load_pooling(folder: Path, modules: Sequence[_Module], truncate_dim: int | None) -> Pooling:
    """Load the modules of sentence-transformers that follow the transformer."""
    require("eval", "sentence_transformers")
    from sentence_transformers import models  # type: ignore[attr-defined]

    config = read_json(folder / modules[1].path / "config.json")
    loaded: list[nn.Module] = []
    for module in modules[1:]:
        # Normalize has neither settings nor weights.
        if module.class_name == "Normalize":
            instance = models.Normalize()
        else:
            instance = getattr(models, module.class_name).load(str(folder / module.path))
        loaded.append(instance.requires_grad_(False))
    return Pooling(
        pooling_mode(config), config.get("include_prompt", True), tuple(loaded), truncate_dim
    )


def _load_source(
    options: ModelOptions,
    card: CardOptions,
    folder: Path,
    modules: Sequence[_Module],
    scratch: Path,
) -> SourceModel:
    """Load a Hub folder.

    Args:
        options: Model and tokenizer.
        card: Metadata of the model card.
        folder: Directory of the weights.
        modules: Modules of sentence-transformers, empty for other folders.
        scratch: Directory for temporary files.

    Raises:
        UserError: If the model cannot be read, is not a NeoBERT, or its parts do not fit.
    """
    model_path = Path(options.folder)
    # A sentence encoder is exported without its head: its modules read the hidden states.
    head, model = _load_model(folder, options.head or ("base" if modules else None))
    config: Any = model.config

    # sentence-transformers limits the sequence length in a file of its own.
    max_length = config.context_length
    limits_path = folder / "sentence_bert_config.json"
    if limits_path.is_file():
        max_length = min(read_json(limits_path).get("max_seq_length") or max_length, max_length)

    tokenizer_source = find_tokenizer(options.tokenizer, [folder])
    if tokenizer_source is None:
        raise UserError(
            "`--tokenizer` must be a directory, got none. An export contains its tokenizer."
        )
    # The tokenizer is rewritten without code, truncation and padding, as in a conversion.
    tokenizer_folder = scratch / "written-tokenizer"
    tokenizer_folder.mkdir()
    write_tokenizer(tokenizer_source, tokenizer_folder, config.vocab_size, max_length)
    tokenizer = load_tokenizer(tokenizer_folder)

    library_config: dict[str, Any] = {}
    library_path = model_path / "config_sentence_transformers.json"
    if modules and library_path.is_file():
        library_config = read_json(library_path)
    pooling = None
    if modules:
        pooling = _load_pooling(model_path, modules, library_config.get("truncate_dim"))

    # The Hub lists models with the relation "quantized" below their base model.
    metadata = license_metadata(card.license, read_card(model_path))
    metadata |= base_model_metadata(card.base_model, relation="quantized")
    return SourceModel(
        name=model_path.name or str(model_path),
        folder=folder,
        head=head,
        model=model,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        pooling=pooling,
        max_length=min(max_length, tokenizer.model_max_length),
        prompts=library_config.get("prompts") or {},
        metadata=metadata,
        default_prompt_name=library_config.get("default_prompt_name"),
        similarity_fn_name=library_config.get("similarity_fn_name"),
    )


def _load_model(folder: Path, head_option: HeadName | None) -> tuple[Head, nn.Module]:
    """Load the model of a Hub folder in float32, in evaluation mode.

    Args:
        folder: Directory of the weights.
        head_option: Value of `--head`, or None for the head of the weights.

    Raises:
        UserError: If the model cannot be read, or is not a NeoBERT that can be exported.
    """
    try:
        fields = read_json(folder / "config.json")
        if fields.get("model_type") != "neobert":
            raise UserError(f"{folder} must be a NeoBERT, got a {fields.get('model_type')} model.")
        config: Any = NeoBERTConfig.from_pretrained(folder)
        head, _ = choose_head(tensor_names(folder) or (), head_option, config.architectures or ())
        if head.has_choices:
            raise UserError("multiple-choice models cannot be exported: no engine supports them.")
        model_class: Any = head.model_class
        # The weights of a Hub folder are untrusted, so pickles are never loaded. SDPA is the
        # attention that exporters can trace.
        model, report = model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        # transformers would initialize missing tensors with random values.
        missing = sorted(str(name) for name in report["missing_keys"])
        if missing:
            raise UserError(f"{folder} lacks tensors of {head.class_name}: {listed(missing, 5)}.")
    except UserError:
        raise
    except Exception as error:  # Damaged files can raise any exception.
        raise UserError(f"the model in {folder} cannot be loaded: {one_line(error)}.") from error

    # Graphs are traced with padded batches: unpadding depends on the values of the mask.
    model.config.unpad_inputs = False
    model.eval().requires_grad_(False)
    return head, model
