"""The student of a distillation: built, given the teacher's token embeddings, saved in the dtypes
of a small file."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..common.errors import UserError
from ..common.files import write_json
from ..common.loading import WEIGHT_DTYPES, copy_code
from ..common.pooling import save_for_all_versions
from .packed_encoder import load_sentence_transformer


# float8 is e5m2, 2 bits of fraction: the loaders of transformers 4 and 5 turn it into the dtype
# that is asked for (4 keeps e4m3 as it is).
# The torch dtypes of options.STORAGE_DTYPES.
_STORED_AS = {**WEIGHT_DTYPES, "float8": torch.float8_e5m2}


def build_student(arguments, teacher, width):
    """A SentenceTransformer: NeoBERT, pooling, a Dense module where the widths differ, and
    Normalize where the teacher has it.

    Args:
        arguments: `DistillArguments`.
        teacher: SentenceTransformer.
        width: of the teacher's vectors, D.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as modules

    student = _loaded(arguments) if arguments.init_from else _fresh(arguments, teacher)
    own = student[0].auto_model.config.hidden_size
    parts = [student[0], student[1]]
    if own != width:
        trained = [module for module in student.children() if isinstance(module, modules.Dense)]
        fits = trained and trained[0].linear.weight.shape == (width, own)
        parts.append(trained[0] if fits else _projection(own, width))
    if any(isinstance(module, modules.Normalize) for module in teacher.children()):
        parts.append(modules.Normalize())
    student = SentenceTransformer(modules=parts, device="cpu")
    if arguments.embeddings_from_teacher:
        take_embeddings(student, teacher, _STORED_AS[arguments.embedding_dtype])
    if arguments.freeze_embeddings:
        student[0].auto_model.get_input_embeddings().weight.requires_grad_(False)
    student.max_seq_length = arguments.max_length
    return student


def _projection(own, width):
    """A new linear map from the student's width to the teacher's."""
    from sentence_transformers import models as modules

    dense = modules.Dense(own, width, bias=False, activation_function=torch.nn.Identity())
    torch.nn.init.orthogonal_(dense.linear.weight)
    return dense


def _loaded(arguments):
    student = load_sentence_transformer(
        arguments.init_from,
        max_length=arguments.max_length,
        pooling=arguments.pooling,
        trust_remote_code=arguments.trust_remote_code,
    )
    if student[0].auto_model.config.model_type != "neobert":
        raise UserError(
            f"the student must be a NeoBERT, but {arguments.init_from} is a "
            f"{student[0].auto_model.config.model_type}"
        )
    return student


def _fresh(arguments, teacher):
    """An untrained NeoBERT with the teacher's tokenizer."""
    from ..configuration_neobert import NeoBERTConfig
    from ..modeling_neobert import NeoBERTModel

    tokenizer = teacher.tokenizer
    given = {"max_position_embeddings": 512, **arguments.model_config}
    given |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    try:
        model = NeoBERTModel(NeoBERTConfig(**given))
    except (TypeError, ValueError) as error:
        raise UserError(f"model_config: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        # Not model.save_pretrained, which writes in a run's first process alone.
        write_json(
            Path(folder) / "config.json", {**model.config.to_dict(), "architectures": ["NeoBERT"]}
        )
        save_file(model.state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)
        return load_sentence_transformer(
            folder, max_length=arguments.max_length, pooling=arguments.pooling
        )


@torch.no_grad()
def take_embeddings(student, teacher, storage):
    """Copies the teacher's token embeddings into the student, rounded to what will be stored.

    A narrower student gets the principal components of them (of the uncentred matrix, so that
    scalar products are kept best).

    Raises:
        UserError: the vocabularies differ, or the student is wider.
    """
    source = teacher[0].auto_model.get_input_embeddings().weight.float().cpu()
    target = student[0].auto_model.get_input_embeddings().weight
    rows, width = target.shape
    if student.tokenizer.get_vocab() != teacher.tokenizer.get_vocab() or width > source.shape[1]:
        raise UserError(
            "embeddings_from_teacher needs a student with the teacher's vocabulary and a "
            f"hidden_size of at most {source.shape[1]}; leave it out, or take another student"
        )
    if width < source.shape[1]:
        _, vectors = torch.linalg.eigh(source.double().T @ source.double())
        source = source @ vectors[:, -width:].flip(1).float()
    target.copy_(source[:rows].to(storage).float())


def save_student(student, folder, dtype, embedding_dtype):
    """Writes the sentence encoder with its code: matrices in `dtype`, token embeddings in
    `embedding_dtype`. Vectors (of norms) have at least 16 bits.

    The config asks for float32, which is what the weights are loaded as where nothing else is asked
    for.
    """
    folder = Path(folder)
    save_for_all_versions(student, folder)
    copy_code(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        wanted = embedding_dtype if name.endswith("encoder.weight") else dtype
        if wanted == "float8" and tensor.dim() == 1:
            wanted = "float16"
        weights[name] = tensor.to(_STORED_AS[wanted])
    save_file(weights, path, metadata={"format": "pt"})
