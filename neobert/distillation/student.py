"""Student of a distillation: construction, initialization from the teacher, and storage."""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_array
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules  # type: ignore[attr-defined]

from ..common.errors import UserError, one_line
from ..common.files import write_json
from ..common.loading import WEIGHT_DTYPES, copy_code, vocabulary_size
from ..common.sentence_transformers_files import save_for_all_versions
from ..configuration_neobert import NeoBERTConfig
from ..embeddings.packed_encoder import PackedEncoder, load_sentence_transformer
from ..modeling_neobert import NeoBERTModel
from ..quantization.smoothing import balance, encoders_of
from .options import ModelOptions, StudentOptions


if TYPE_CHECKING:
    from transformers import PretrainedConfig


logger = logging.getLogger("neobert.distillation")

# Dtypes of torch for `options.StorageDtype`. float8 is e5m2, 2 bits of fraction: transformers 4
# and 5 convert it to the dtype that a user asks for, while version 4 keeps e4m3 as it is.
STORAGE_DTYPES = {**WEIGHT_DTYPES, "float8": torch.float8_e5m2}

# Ridge penalty, number of iterations and smallest denominator of `fit_token_embeddings`.
RIDGE = 0.02
NUM_ITERATIONS = 5
EPSILON = 1e-12
# Version of the token embeddings that `--work` stores. Raise it when a change of
# `embed_single_tokens` or `fit_token_embeddings` changes their result, so stored files of the older
# algorithm are not used.
TOKEN_TABLE_VERSION = 1
# Maximum number of texts that `balance_student` observes.
BALANCE_TEXTS = 256


def build_student(
    model: ModelOptions, options: StudentOptions, teacher: SentenceTransformer, teacher_dim: int
) -> SentenceTransformer:
    """Build the student: NeoBERT, pooling, and the other modules that the teacher's output needs.

    A Dense module maps the hidden size of the student to the embedding dimension of the teacher if
    they differ, or if the initial model has such a module. The student ends with a Normalize
    module if the teacher does.

    Args:
        model: Options of the models.
        options: Options of the student.
        teacher: Teacher.
        teacher_dim: Embedding dimension of the teacher, D.

    Raises:
        UserError: If the initial model is not a NeoBERT, or the student cannot be initialized
            from the teacher.
    """
    if model.init_from:
        initial_model = _load_initial_model(model, options)
    else:
        initial_model = _new_student(model, options, teacher)

    # The student has the modules Transformer and Pooling of the initial model, and those that the
    # embeddings of the teacher need.
    hidden_size = _encoder(initial_model).config.hidden_size
    parts = [initial_model[0], initial_model[1]]
    # A student that was trained before keeps its map to the teacher's dimension.
    maps = [module for module in initial_model.children() if isinstance(module, modules.Dense)]
    if maps and maps[0].linear.weight.shape == (teacher_dim, hidden_size):
        parts.append(maps[0])
    elif hidden_size != teacher_dim:
        # An orthogonal map without a bias preserves the lengths and angles of embeddings.
        dense = modules.Dense(
            hidden_size, teacher_dim, bias=False, activation_function=torch.nn.Identity()
        )
        torch.nn.init.orthogonal_(dense.linear.weight)
        parts.append(dense)
    if any(isinstance(module, modules.Normalize) for module in teacher.children()):
        parts.append(modules.Normalize())

    student = SentenceTransformer(modules=parts, device="cpu")
    # `loss.forward_in_groups` needs padding on the right, also if the teacher pads on the left.
    student.tokenizer.padding_side = "right"
    if options.embeddings_from_teacher:
        _check_embeddings(student, teacher, teacher_dim)
    if options.freeze_embeddings:
        _encoder(student).get_input_embeddings().weight.requires_grad_(False)
    return student


def _encoder(model: SentenceTransformer) -> Any:
    """Return the transformer of a sentence encoder."""
    return model[0].auto_model


def _load_initial_model(model: ModelOptions, options: StudentOptions) -> SentenceTransformer:
    """Load the NeoBERT of `--init-from`."""
    student = load_sentence_transformer(
        str(model.init_from),
        max_length=options.max_length,
        pooling=options.pooling,
        trust_remote_code=model.trust_remote_code,
    )
    model_type = _encoder(student).config.model_type
    if model_type != "neobert":
        raise UserError(f"`init_from` must be a NeoBERT, but {model.init_from} is a {model_type}.")
    return student


def _new_student(
    model: ModelOptions, options: StudentOptions, teacher: SentenceTransformer
) -> SentenceTransformer:
    """Return an untrained NeoBERT with the tokenizer of the teacher."""
    tokenizer = teacher.tokenizer
    fields = model.model_config or default_student_config(_encoder(teacher).config)
    # The vocabulary is that of the teacher, whatever `model_config` contains.
    fields = {
        "max_position_embeddings": max(512, options.max_length),
        **fields,
        "vocab_size": vocabulary_size(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        neobert = NeoBERTModel(NeoBERTConfig(**fields))
    except (TypeError, ValueError) as error:
        raise UserError(f"`model_config` is not valid: {one_line(error)}.") from error

    if options.embeddings_from_teacher:
        # The blocks start as identities, so the student starts as the mean of its token
        # embeddings.
        blocks: Any = neobert.transformer_encoder
        for block in blocks:
            torch.nn.init.zeros_(block.wo.weight)
            torch.nn.init.zeros_(block.ffn.w3.weight)

    # `load_sentence_transformer` adds the pooling to a model that is in a directory.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # `save_pretrained` would write in the main process of a distributed run only.
        config = {**neobert.config.to_dict(), "architectures": ["NeoBERT"]}
        write_json(folder / "config.json", config)
        weights = neobert.state_dict()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(name)
        return load_sentence_transformer(
            name, max_length=options.max_length, pooling=options.pooling
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


def resolve_embeddings_from_teacher(
    model: ModelOptions, options: StudentOptions, teacher: PackedEncoder
) -> bool:
    """Return the value of `--embeddings-from-teacher`, whose default depends on both models.

    Raises:
        UserError: If `model_config` is not valid.
    """
    # The other initializations of a student set its token embeddings, too.
    if options.embeddings_from_teacher is not None:
        return options.embeddings_from_teacher
    if model.init_from or model.init_from_teacher:
        return False
    # Principal components can reduce the dimension of the embeddings, but not increase it.
    teacher_config = _encoder(teacher.sentence_transformer).config
    fields = model.model_config or default_student_config(teacher_config)
    try:
        return NeoBERTConfig(**fields).hidden_size <= teacher.embedding_dimension
    except (TypeError, ValueError) as error:
        raise UserError(f"`model_config` is not valid: {one_line(error)}.") from error


def have_same_vocabulary(student: SentenceTransformer, teacher: SentenceTransformer) -> bool:
    """Return whether both tokenizers have the same tokens with the same IDs."""
    return bool(student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab())


def _check_embeddings(
    student: SentenceTransformer, teacher: SentenceTransformer, teacher_dim: int
) -> None:
    """Check that the teacher's embeddings of single tokens can initialize those of the student.

    Raises:
        UserError: If the vocabularies differ, or the student's hidden size is larger than the
            teacher's embedding dimension.
    """
    is_larger = _encoder(student).config.hidden_size > teacher_dim
    if is_larger or not have_same_vocabulary(student, teacher):
        raise UserError(
            "`embeddings_from_teacher` needs a student with the teacher's vocabulary and a "
            f"hidden_size of at most {teacher_dim}. Pass --embeddings-from-teacher false, or "
            "change the student."
        )


def check_hidden_states(student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Check that the hidden states of both models can be compared token by token.

    Raises:
        UserError: If the models have different vocabularies or hidden sizes, or the teacher
            supports shorter texts than the student.
    """
    expected = _encoder(teacher).config.hidden_size
    has_other_size = _encoder(student).config.hidden_size != expected
    if has_other_size or not have_same_vocabulary(student, teacher):
        raise UserError(
            "`hidden_state_weight` needs a student with the teacher's vocabulary and hidden_size "
            f"({expected}). Change the model_config of the student, or pass "
            "--hidden-state-weight 0."
        )

    # The teacher runs on the tokens of the student, and must not truncate them.
    length = student.max_seq_length
    limit = teacher.max_seq_length
    if limit is not None and (length is None or length > limit):
        raise UserError(
            f"`max_length` must be at most {limit}, the maximum sequence length of the teacher, "
            f"for --hidden-state-weight, got {length}. Pass --max-length {limit}."
        )


def embed_single_tokens(teacher: PackedEncoder, count: int) -> np.ndarray:
    """Return the teacher's embeddings of its first `count` tokens, (count, D) float32.

    Each token is alone between the special tokens.
    """
    # An empty text consists of the special tokens, [CLS] and [SEP].
    (special,) = teacher.tokenize([""])
    return teacher.embed([np.insert(special, len(special) // 2, i) for i in range(count)])


def fit_token_embeddings(
    single_tokens: np.ndarray,
    tokens: Sequence[np.ndarray],
    embeddings: np.ndarray,
    num_iterations: int = NUM_ITERATIONS,
) -> np.ndarray:
    """Return the token embeddings whose mean over a text is nearest to the teacher's embedding.

    The result is a ridge regression around a multiple of `single_tokens`, solved with conjugate
    gradients and the diagonal as preconditioner.

    Args:
        single_tokens: Embeddings of single tokens, (V, D).
        tokens: Token ids of N texts.
        embeddings: The teacher's embeddings of the texts, (N, D).
        num_iterations: Number of iterations.

    Returns:
        Token embeddings, (V, D) float32.
    """
    lengths = np.array([len(ids) for ids in tokens])
    rows = np.repeat(np.arange(len(tokens)), lengths)
    weights = np.repeat(1 / lengths, lengths)
    columns = np.concatenate(tokens)
    # Row i of `texts` averages the tokens of text i, so texts @ table are the bags of words.
    texts = csr_array((weights, (rows, columns)), (len(tokens), len(single_tokens)))

    targets = np.float32(embeddings)
    targets = targets / np.linalg.norm(targets, axis=1, keepdims=True)
    # The best multiple of the single tokens is the center of the ridge penalty.
    means = texts @ single_tokens
    table = single_tokens * (means * targets).sum() / np.square(means).sum()

    # Preconditioned conjugate gradients, for all columns of the table at once. The matrix is
    # A = texts.T @ texts + RIDGE * I, and the names are those of textbooks: search direction p,
    # product A p, step size alpha, and scalar product rz of the residual r and z = r / diagonal.
    diagonal = texts.multiply(texts).sum(0)[:, None] + RIDGE
    r = texts.T @ (targets - texts @ table)
    p = r / diagonal
    rz = (r * r / diagonal).sum(0)
    for _ in range(num_iterations):
        a_p = texts.T @ (texts @ p) + RIDGE * p
        alpha = rz / ((p * a_p).sum(0) + EPSILON)
        table = table + alpha * p
        r = r - alpha * a_p
        rz_old = rz
        rz = (r * r / diagonal).sum(0)
        p = r / diagonal + rz / (rz_old + EPSILON) * p
    return np.float32(table)


@torch.no_grad()
def set_token_embeddings(
    student: SentenceTransformer, table: torch.Tensor, storage: torch.dtype
) -> None:
    """Initialize the token embeddings of the student with a table.

    The student then is the mean of the table's rows over the tokens of a text. NeoBERT normalizes
    the last hidden state of every token, which would lose the norms of the rows. The coordinate
    with the least energy is therefore replaced by sqrt(1 - norm^2), which gives every row length 1,
    and its weight in the last norm is set to 0. If the hidden size is smaller than D, the rows are
    projected on their principal components (of the table without centering, which preserves scalar
    products best), and the Dense module maps them back.

    Args:
        student: Student.
        table: Token embeddings, (V, D), which may be overwritten.
        storage: Dtype that the embeddings are rounded to.
    """
    model = _encoder(student)
    target = model.get_input_embeddings().weight
    hidden_size = target.shape[1]
    if hidden_size < table.shape[1]:
        # eigh returns the eigenvalues in ascending order.
        _, eigenvectors = torch.linalg.eigh(table.double().T @ table.double())
        components = eigenvectors[:, -hidden_size:].flip(1).float()
        table = table @ components
        projection: Any = student[2]
        projection.linear.weight.copy_(components)

    # Every row gets length 1 by a spare coordinate, that with the least information. One very long
    # row must not make all others short, so rows beyond the 99.9 % quantile are shortened.
    spare = int(table.square().sum(0).argmin())
    table[:, spare] = 0
    lengths = table.norm(dim=1)
    # Other lengths than 1, such as 4 and 16, do not improve the training.
    table /= torch.maximum(lengths, lengths.quantile(0.999))[:, None]
    table[:, spare] = (1 - table.square().sum(1)).clamp(min=0).sqrt()

    # The student trains on the values that its saved embeddings will have.
    # A model with padded rows has more of them than the tokenizer has ids.
    target[: len(table)].copy_(table[: len(target)].to(storage).float())
    model.layer_norm.weight[spare] = 0


def balance_student(student: SentenceTransformer, texts: Sequence[str]) -> None:
    """Scale the channels of a student for int8, see `quantization.smoothing.balance`.

    The embeddings do not change, because all factors are powers of two.

    Args:
        student: Student.
        texts: Training texts, of which at most `BALANCE_TEXTS` are used.
    """
    # Every n-th text, because the texts of several files are in the order of the files.
    texts = texts[:: len(texts) // BALANCE_TEXTS + 1]
    for encoder in encoders_of(student):
        # One text at a time, because the values of padding would be observed, too.
        balance(encoder, lambda: student.encode(list(texts), batch_size=1, show_progress_bar=False))


def save_student(
    student: SentenceTransformer, folder: Path | str, dtype: str, embedding_dtype: str
) -> None:
    """Write the sentence encoder with its code.

    The configuration requests float32, the dtype that the weights are loaded as by default. Weights
    that exceed the range of their dtype are stored in bfloat16.

    Args:
        student: Student.
        folder: Directory, which must exist.
        dtype: Dtype of the matrices, from `STORAGE_DTYPES`. The weights of norms have at least 16
            bits.
        embedding_dtype: Dtype of the token embeddings.
    """
    folder = Path(folder)
    save_for_all_versions(student, folder)
    copy_code(folder)

    # sentence-transformers has written float32 weights, which are replaced by those of the options.
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        storage = embedding_dtype if name.endswith("encoder.weight") else dtype
        # The norms have few weights, so a larger dtype does not need more storage.
        if storage == "float8" and tensor.dim() == 1:
            storage = "float16"
        stored = tensor.to(STORAGE_DTYPES[storage])

        # Not all versions of torch have `isfinite` for float8.
        if tensor.isfinite().all() and not stored.float().isfinite().all():
            # bfloat16 has the range of float32.
            logger.warning(
                "%s is stored in bfloat16, because its weights exceed the range of %s.",
                name,
                storage,
            )
            stored = tensor.to(torch.bfloat16)
        weights[name] = stored
    save_file(weights, path, metadata={"format": "pt"})
