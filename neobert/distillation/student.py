"""The student of a distillation: built, given token embeddings made by the teacher, saved in the
dtypes of a small file."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_array

from ..common.errors import UserError
from ..common.files import write_json
from ..common.loading import WEIGHT_DTYPES, copy_code
from ..common.pooling import save_for_all_versions
from ..configuration_neobert import NeoBERTConfig
from ..embeddings.packed_encoder import load_sentence_transformer


if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PretrainedConfig

    from .options import DistillArguments


# float8 is e5m2, 2 bits of fraction: the loaders of transformers 4 and 5 turn it into the dtype
# that is asked for (4 keeps e4m3 as it is).
# The torch dtypes of options.STORAGE_DTYPES.
STORED_AS = {**WEIGHT_DTYPES, "float8": torch.float8_e5m2}
RIDGE, ROUNDS, TINY = 0.02, 5, 1e-12  # of `fitted_table`


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
        _check_embeddings(student, teacher)
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
    from ..modeling_neobert import NeoBERTModel

    tokenizer = teacher.tokenizer
    fields = arguments.model_config or default_student_config(teacher[0].auto_model.config)
    given = {"max_position_embeddings": 512, **fields}
    given |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    try:
        model = NeoBERTModel(NeoBERTConfig(**given))
    except (TypeError, ValueError) as error:
        raise UserError(f"model_config: {error}") from error
    if arguments.embeddings_from_teacher:
        # Blocks that begin as identities: the student begins as the mean of its token embeddings.
        for block in model.transformer_encoder:
            torch.nn.init.zeros_(block.wo.weight)
            torch.nn.init.zeros_(block.ffn.w3.weight)
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


def default_student_config(teacher_config: "PretrainedConfig") -> dict[str, int]:
    """Return the fields of a student with half of the teacher's layers and its hidden size."""
    hidden_size = teacher_config.hidden_size
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": max(1, teacher_config.num_hidden_layers // 2),
        "num_attention_heads": teacher_config.num_attention_heads,
        "intermediate_size": 5 * hidden_size // 2,
    }


def starts_from_teacher(arguments: "DistillArguments", teacher: "SentenceTransformer") -> bool:
    """Return whether the student's token embeddings are initialized from the teacher."""
    if arguments.embeddings_from_teacher is not None:
        return arguments.embeddings_from_teacher
    if arguments.init_from:
        return False
    if not arguments.model_config:
        return True
    student_hidden_size = NeoBERTConfig(**arguments.model_config).hidden_size
    return student_hidden_size <= teacher[0].auto_model.config.hidden_size


def _check_embeddings(student, teacher):
    """Raises UserError where the vocabularies differ, or the student is wider."""
    width = teacher[0].auto_model.config.hidden_size
    same = student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
    if not same or student[0].auto_model.config.hidden_size > width:
        raise UserError(
            "embeddings_from_teacher needs a student with the teacher's vocabulary and a "
            f"hidden_size of at most {width}; leave it out, or take another student"
        )


def token_vectors(teacher, count):
    """The teacher's vectors of its first `count` tokens, each alone between the special tokens,
    (count, D) float32.

    Args:
        teacher: `PackedEncoder`.
    """
    (special,) = teacher.tokenize([""])
    return teacher.embed([np.insert(special, len(special) // 2, i) for i in range(count)])


def fitted_table(alone, tokens, vectors, rounds=ROUNDS):
    """The table whose mean over the tokens of a text is nearest to the teacher's vector of it,
    (V, D) float32: ridge regression around a multiple of `alone`, by conjugate gradients with the
    diagonal as preconditioner.

    Args:
        alone: (V, D), `token_vectors`.
        tokens: list of N integer arrays.
        vectors: (N, D), the teacher's vectors of the texts.
    """
    lengths = np.array([len(ids) for ids in tokens])
    rows, shares = np.repeat([np.arange(len(tokens)), 1 / lengths], lengths, axis=1)
    texts = csr_array(
        (shares, (rows.astype(int), np.concatenate(tokens))), (len(tokens), len(alone))
    )
    targets = np.float32(vectors) / np.linalg.norm(np.float32(vectors), axis=1, keepdims=True)
    start = texts @ alone
    table = alone * (start * targets).sum() / np.square(start).sum()
    diagonal = texts.multiply(texts).sum(0)[:, None] + RIDGE
    rest = texts.T @ (targets - texts @ table)
    direction, product = rest / diagonal, (rest * rest / diagonal).sum(0)
    for _ in range(rounds):
        moved = texts.T @ (texts @ direction) + RIDGE * direction
        step = product / ((direction * moved).sum(0) + TINY)
        table, rest = table + step * direction, rest - step * moved
        product, before = (rest * rest / diagonal).sum(0), product
        direction = rest / diagonal + product / (before + TINY) * direction
    return np.float32(table)


@torch.no_grad()
def take_embeddings(student, table, storage):
    """Gives the student the table as its token embeddings, rounded to the dtype `storage`, so that
    it begins as the mean of the table's rows over the tokens of a text.

    NeoBERT scales the last hidden state of every token to one length. So that a row keeps its
    weight, the coordinate that says least holds what a row lacks to length 1, and the last norm
    leaves it out. A narrower student gets the principal components (of the uncentred table, so that
    scalar products are kept best), and its `Dense` module the way back.

    Args:
        table: (V, D).
    """
    model = student[0].auto_model
    target = model.get_input_embeddings().weight
    width = target.shape[1]
    if width < table.shape[1]:
        _, vectors = torch.linalg.eigh(table.double().T @ table.double())
        components = vectors[:, -width:].flip(1).float()
        table = table @ components
        student[2].linear.weight.copy_(components)
    spare = int(table.square().sum(0).argmin())
    table[:, spare] = 0
    lengths = table.norm(dim=1)
    # Rows of length 4 and 16 train no better.
    table /= torch.maximum(lengths, lengths.quantile(0.999))[:, None]
    table[:, spare] = (1 - table.square().sum(1)).clamp(min=0).sqrt()
    target.copy_(table[: len(target)].to(storage).float())
    model.layer_norm.weight[spare] = 0


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
        weights[name] = tensor.to(STORED_AS[wanted])
    save_file(weights, path, metadata={"format": "pt"})
