"""Block-wise transfer: initialize the blocks of a student from layers of a BERT teacher.

A BERT layer has biases, GELU, learned positions, and LayerNorm after each residual connection. A
NeoBERT block has SwiGLU, RoPE, RMSNorm before attention and feed-forward, and no biases. No formula
converts the weights of a layer to those of a block. Instead, the teacher and the student run on the
same texts, and the blocks are initialized one after the other, in the order of a forward pass:

1. Each matrix is fitted by ridge regression: the inputs are those of the student, the targets are
   the corresponding values of the teacher. A matrix therefore corrects the errors of the matrices
   before it.
2. Queries and keys are trained to reproduce the attention probabilities of the teacher, because
   RoPE replaces the learned positions.
3. The block is trained to reproduce the hidden states of the teacher for every token.

The blocks reproduce the directions of hidden states. After the last block, a coordinate is fitted
that lets the last RMSNorm reproduce their norms, too.

Gradients are back-propagated through one block at a time.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from torch import nn

from ..common.errors import UserError
from ..common.loading import STANDARD_BLOCK, block_type
from ..modeling_neobert import rotary_embeddings
from ..training.muon import muon_optimizer
from .student import have_same_vocabulary


logger = logging.getLogger("neobert.distillation")

# Version of the blocks that `--work` stores. Raise it when a change of the transfer, its constants
# or its batches (also in command.py) changes the result, so blocks of the older algorithm are not
# used.
TRANSFER_VERSION = 2
# GELU(z) is approximately z * sigmoid(1.702 z) = silu(1.702 z) / 1.702 (arXiv 1606.08415).
GELU_SLOPE = 1.702
# Ridge penalty, relative to the mean square of an input.
RIDGE = 1e-3
# Minimum number of tokens that the matrices are fitted on, and number of tokens per training step.
MIN_FIT_TOKENS = 60_000
BATCH_TOKENS = 2_048
# Learning rates relative to the root mean square of a matrix.
ATTENTION_RATE = 0.05
BLOCK_RATE = 0.025
MUON_BLOCK_RATE = 0.05
# Norms of hidden states after a block, relative to those before its feed-forward, that are tried.
OUTPUT_NORMS = (1, 2, 4)
# Norm of hidden states after a block, relative to those before it, above which the training of
# the block is penalized. The next RMSNorm removes the norm, so it would grow without a bound: large
# states overflow in float16, and an optimizer hardly changes the large weights that compute them.
MAX_GROWTH = 4
# Quantile of the norms of the last hidden states of a teacher that a student can reproduce.
NORM_QUANTILE = 0.9
# Number of positions over which the input embedding of a token is averaged.
POSITIONS = 40

# One tensor (B, L, D) per batch of texts of equal length.
Batches = list[torch.Tensor]


def default_layers(layer_count: int, block_count: int) -> list[int]:
    """Return the layers of a teacher that initialize a student of fewer blocks.

    These are the lowest and the highest ones: all-MiniLM-L6-v2 with layers 0, 1, 4 and 5 retrieves
    nearly as well as with all six, and with layers 0 to 3 worse than without layers.

    Args:
        layer_count: Number of layers of the teacher.
        block_count: Number of blocks of the student.

    Raises:
        UserError: If the student has more blocks than the teacher has layers.
    """
    if block_count > layer_count:
        raise UserError(
            f"`num_hidden_layers` of the student must be at most {layer_count}, the number of "
            f"layers of the teacher, got {block_count}. Change `model_config`, or remove "
            "--init-from-teacher."
        )
    lowest = (block_count + 1) // 2
    return [*range(lowest), *range(layer_count - block_count + lowest, layer_count)]


class TeacherLayers:
    """BERT teacher of which some layers are kept.

    Args:
        teacher: Sentence encoder whose transformer is a BERT.
        layers: Layers to keep, counted from 0.

    Raises:
        UserError: If the teacher is not a BERT with learned positions, or has no such layers.
    """

    def __init__(self, teacher: SentenceTransformer, layers: Sequence[int]) -> None:
        model: Any = teacher[0].auto_model
        config = model.config
        # transformers 5 has no such field in the configuration of BERT, whose positions are
        # learned.
        positions = getattr(config, "position_embedding_type", "absolute")
        if config.model_type != "bert" or positions != "absolute" or config.hidden_act != "gelu":
            raise UserError(
                "--init-from-teacher needs a BERT teacher with GELU and learned positions, got "
                f"{config.model_type} with {config.hidden_act} and {positions} positions. Remove "
                "--init-from-teacher."
            )

        count = config.num_hidden_layers
        if not layers or not all(0 <= layer < count for layer in layers):
            raise UserError(
                f"`teacher_layers` must be between 0 and {count - 1}, the layers of the teacher, "
                f"got {list(layers)}."
            )

        self.config = config
        self.indices = list(layers)
        self.embeddings = model.embeddings
        self.layers: list[Any] = [model.encoder.layer[layer] for layer in layers]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states before the first layer, (B, L, D)."""
        return self.embeddings(input_ids=token_ids)

    def run(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after a layer, (B, L, D)."""
        # The layer is computed here, without its dropout and its attention mask: texts of a batch
        # have equal lengths.
        attended = hidden + self.attention(layer, hidden)
        attended = layer.attention.output.LayerNorm(attended)
        inner = F.gelu(layer.intermediate.dense(attended))
        return layer.output.LayerNorm(attended + layer.output.dense(inner))

    def attention_logits(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scaled products of queries and keys of a layer, (B, H, L, L)."""
        query = self._split(layer.attention.self.query(hidden))
        key = self._split(layer.attention.self.key(hidden))
        return query @ key.mT * query.shape[-1] ** -0.5

    def attention(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the self-attention of a layer before the residual, (B, L, D)."""
        probabilities = self.attention_logits(layer, hidden).softmax(-1)
        value = self._split(layer.attention.self.value(hidden))
        return layer.attention.output.dense(_merge(probabilities @ value))

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        """Split (B, L, D) into heads, (B, H, L, K)."""
        return states.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)

    def token_table(self) -> torch.Tensor:
        """Return the input embeddings of all tokens, averaged over positions, (V, D)."""
        words = self.embeddings.word_embeddings.weight
        # Texts have the token type 0.
        words = words + self.embeddings.token_type_embeddings.weight[0]
        count = min(POSITIONS, len(self.embeddings.position_embeddings.weight))

        total = torch.zeros_like(words)
        for position in self.embeddings.position_embeddings.weight[:count]:
            total += self.embeddings.LayerNorm(words + position)
        return total / count


def load_teacher_layers(
    student: SentenceTransformer, teacher: SentenceTransformer, layers: Sequence[int]
) -> TeacherLayers:
    """Return the layers of the teacher that initialize a student.

    Args:
        student: Student, a NeoBERT.
        teacher: Teacher.
        layers: Layers of the teacher, counted from 0; by default those of `default_layers`.

    Raises:
        UserError: If the teacher is not a BERT, or student and teacher do not fit together.
    """
    if not have_same_vocabulary(student, teacher):
        raise UserError(
            "--init-from-teacher needs a student with the vocabulary of the teacher, got another "
            "one. Remove --init-from-teacher."
        )

    # The student reproduces hidden states, so its pooling must be that of the teacher, too.
    expected = str(getattr(teacher[1], "pooling_mode", None))
    pooling = str(getattr(student[1], "pooling_mode", None))
    if pooling != expected:
        raise UserError(
            f"`pooling` must be {expected}, that of the teacher, for --init-from-teacher, got "
            f"{pooling}. Pass --pooling {expected}."
        )

    student_model: Any = student[0].auto_model
    teacher_model: Any = teacher[0].auto_model
    if not layers:
        block_count = student_model.config.num_hidden_layers
        layers = default_layers(teacher_model.config.num_hidden_layers, block_count)
    kept = TeacherLayers(teacher, layers)
    check_student(student_model, kept)
    return kept


def check_student(student: nn.Module, teacher: TeacherLayers) -> None:
    """Raise UserError if the sizes of a student do not allow `initialize_blocks`.

    Args:
        student: `NeoBERTModel`.
        teacher: Layers of the teacher.
    """
    config: Any = student.config
    # Queries, keys and values are fitted head by head, and the residual stream is that of the
    # teacher.
    for name in ("hidden_size", "num_attention_heads"):
        expected = getattr(teacher.config, name)
        value = getattr(config, name)
        if value != expected:
            raise UserError(
                f"`{name}` of the student must be {expected}, that of the teacher, for "
                f"--init-from-teacher, got {value}. Change `model_config`."
            )

    if config.num_hidden_layers != len(teacher.layers):
        raise UserError(
            f"`teacher_layers` must name one layer per block of the student, "
            f"{config.num_hidden_layers}, got {len(teacher.layers)}."
        )
    # The methods of `BlockTransfer` compute the parts of a block themselves.
    if block_type(config) != STANDARD_BLOCK:
        raise UserError(
            "`model_config` must have SwiGLU, RMSNorm and RoPE for --init-from-teacher. Remove "
            "`hidden_act`, `norm_type` and `position_embedding_type`."
        )


def initialize_blocks(
    student: Any,
    teacher: TeacherLayers,
    batches: Sequence[torch.Tensor],
    steps: int,
    storage: torch.dtype = torch.float32,
    bf16: bool = False,
    muon: bool = False,
) -> None:
    """Initialize token embeddings and blocks of a student from the layers of a teacher.

    Args:
        student: `NeoBERTModel` that `check_student` accepts, on the device of the teacher.
        teacher: Layers of the teacher.
        batches: Token IDs of texts of equal length per batch, (B, L) each.
        steps: Number of training steps of each block. 0 to fit the matrices only.
        storage: Dtype that the token embeddings are rounded to before the blocks are fitted.
        bf16: Whether to train in bfloat16 with autocast.
        muon: Whether to train the blocks with Muon instead of Adam.

    Raises:
        UserError: If `muon` is set, and torch has no Muon.
    """
    with torch.no_grad():
        # The embeddings of a teacher may have more rows than its tokenizer has tokens.
        table = teacher.token_table()[: len(student.encoder.weight)]
        student.encoder.weight.copy_(table.to(storage).float())
        student_states = [student.encoder(token_ids) for token_ids in batches]
        teacher_inputs = [teacher.embed(token_ids) for token_ids in batches]

    for index, (block, layer) in enumerate(zip(student.transformer_encoder, teacher.layers)):
        with torch.no_grad():
            teacher_outputs = [teacher.run(layer, hidden) for hidden in teacher_inputs]
        transfer = BlockTransfer(
            block, layer, teacher, student_states, teacher_inputs, teacher_outputs
        )
        transfer.fit_attention()
        transfer.train_attention(steps // 5)
        transfer.fit_outputs()
        transfer.train_block(steps, bf16, muon)

        # The next block is fitted on the states of this one, not on those of the teacher.
        with torch.no_grad():
            student_states = [transfer.run(hidden) for hidden in student_states]
        logger.info(
            "Block %d from layer %d of the teacher: the unexplained variance of its hidden states "
            "is %.1f %%, and their root mean square is %.3g.",
            index,
            teacher.indices[index],
            100 * unexplained_variance(student_states, teacher_outputs),
            _flat(student_states).square().mean().sqrt(),
        )
        teacher_inputs = teacher_outputs

    transfer.fit_last_norm(student.layer_norm)


class BlockTransfer:
    """Initialization of one block from one layer.

    Args:
        block: Block of the student.
        layer: Layer of the teacher.
        teacher: Layers of the teacher.
        student_states: Hidden states of the student before the block, (B, L, D) per batch.
        teacher_inputs: Hidden states of the teacher before the layer, (B, L, D) per batch.
        teacher_outputs: Hidden states of the teacher after the layer, (B, L, D) per batch.
    """

    def __init__(
        self,
        block: Any,
        layer: Any,
        teacher: TeacherLayers,
        student_states: Batches,
        teacher_inputs: Batches,
        teacher_outputs: Batches,
    ) -> None:
        self.block = block
        self.layer = layer
        self.teacher = teacher
        self.student_states = student_states
        self.teacher_inputs = teacher_inputs
        self.teacher_outputs = teacher_outputs

        # The matrices are fitted on the first batches; about 60,000 tokens determine them well.
        tokens = 0
        self.num_fit_batches = 0
        while self.num_fit_batches < len(student_states) and tokens < MIN_FIT_TOKENS:
            tokens += student_states[self.num_fit_batches].shape[:-1].numel()
            self.num_fit_batches += 1

    @torch.no_grad()
    def fit_attention(self) -> None:
        """Fit queries, keys and values."""
        block = self.block
        # The fitted matrices contain the scales of the norms.
        block.attention_norm.weight.fill_(1)
        block.ffn_norm.weight.fill_(1)

        # Both models see the same texts, so row i of the inputs and of the targets is one
        # token.
        student_states = self.student_states[: self.num_fit_batches]
        inputs = _flat([_normalize(hidden) for hidden in student_states])
        teacher_inputs = _flat(self.teacher_inputs[: self.num_fit_batches])
        projections = self.layer.attention.self

        query, key, value = (
            ridge(inputs, linear(teacher_inputs)).unflatten(0, (block.num_heads, -1))
            for linear in (projections.query, projections.key, projections.value)
        )
        query, key = order_by_energy(query, key, inputs)
        # The rows of qkv.weight are interleaved per head: (H, 3, K).
        block.qkv.weight.copy_(torch.stack([query, key, value], dim=1).flatten(0, 2))

    def train_attention(self, steps: int) -> None:
        """Train queries and keys on the attention probabilities of the teacher."""
        block = self.block

        def loss(index: int) -> torch.Tensor:
            query, key, _ = self._project(self.student_states[index])
            return self._attention_loss(index, query @ key.mT * block.scaling)

        # Adam leaves the rows of the values unchanged, because their gradients are zero.
        train([block.qkv.weight], loss, len(self.student_states), steps, ATTENTION_RATE)

    @torch.no_grad()
    def fit_outputs(self) -> None:
        """Fit the output of the attention and the feed-forward.

        The gates are the neurons of the teacher with the largest influence on its output. The
        values are a constant, so SwiGLU becomes GELU.
        """
        # The output of the attention leads from the states of the student to those of the teacher
        # after the attention, so it also corrects the difference of the residual streams.
        block = self.block
        layer = self.layer
        student_states = self.student_states[: self.num_fit_batches]
        outputs = [self._attend(hidden) for hidden in student_states]
        attended = _flat(
            [
                hidden + self.teacher.attention(layer, hidden)
                for hidden in self.teacher_inputs[: self.num_fit_batches]
            ]
        )
        block.wo.weight.copy_(ridge(_flat(outputs), attended - _flat(student_states)))

        # The influence of a neuron is its deviation over tokens times the norm of its output.
        states = _flat(
            [hidden + block.wo(output) for hidden, output in zip(student_states, outputs)]
        )
        inputs = _normalize(states)
        inner = layer.intermediate.dense(layer.attention.output.LayerNorm(attended))
        influence = F.gelu(inner).std(0) * layer.output.dense.weight.norm(dim=0)
        size = block.ffn.w3.in_features
        neurons = influence.argsort(descending=True)[:size]

        # silu(GELU_SLOPE * z) * (1 / GELU_SLOPE) is approximately GELU(z). A ridge regression gives
        # the constant, because the block has no biases.
        gate = ridge(inputs, GELU_SLOPE * inner[:, neurons])
        constant = inputs.new_full((len(inputs), 1), 1 / GELU_SLOPE)
        value = ridge(inputs, constant).expand_as(gate)
        # Neurons of a larger student that have no counterpart start without an effect.
        count = len(neurons)
        block.ffn.w12.weight[:count] = gate
        block.ffn.w12.weight[size : size + count] = value
        block.ffn.w3.weight.zero_()

        activations = F.silu(inputs @ gate.T) * (inputs @ value.T)
        target = _flat(self.teacher_outputs[: self.num_fit_batches])
        block.ffn.w3.weight[:, :count] = self._fit_down_projection(activations, states, target)

    def _fit_down_projection(
        self, activations: torch.Tensor, states: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return the down projection with the least unexplained variance over several norms.

        The next RMSNorm removes the norm of a hidden state, so the target may have any norm. If the
        feed-forward of the teacher replaces most of its input, as in the last layer, the output of
        the block must be so large that its input hardly matters.

        Args:
            activations: Activations of the feed-forward, (T, F).
            states: Hidden states before the feed-forward, (T, D).
            target: Hidden states of the teacher after the layer, (T, D).
        """
        scaled = target * states.norm(dim=-1, keepdim=True) / target.norm(dim=-1, keepdim=True)
        # One regression for all norms, because they have the same inputs.
        outputs = torch.cat([norm * scaled - states for norm in OUTPUT_NORMS], dim=1)
        candidates = ridge(activations, outputs).chunk(len(OUTPUT_NORMS))
        errors = [
            unexplained_variance([states + activations @ weight.T], [target])
            for weight in candidates
        ]
        return candidates[int(np.argmin(errors))]

    def train_block(self, steps: int, bf16: bool = False, muon: bool = False) -> None:
        """Train all matrices on the attention and the hidden states of the teacher."""
        block = self.block
        targets = _flat(self.teacher_outputs)
        variance = targets.var(0).mean()
        device = targets.device.type

        def loss(index: int) -> torch.Tensor:
            hidden = self.student_states[index]
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                query, key, value = self._project(hidden)
                logits = query @ key.mT * block.scaling
                output = block.wo(_merge(logits.softmax(-1).to(value.dtype) @ value))
                states = hidden + output
                states = states + block.ffn(_normalize(states))

            target = self.teacher_outputs[index]
            states = states.float()
            error = states * best_scale(states, target) - target
            unexplained = (error.square() / variance).mean()
            # The scale removes the norm of the states, so only this penalty limits it.
            log_excess = (states.norm() / (MAX_GROWTH * hidden.norm())).log().clamp(min=0)
            return unexplained + self._attention_loss(index, logits) + log_excess.square()

        matrices = [block.qkv.weight, block.wo.weight, block.ffn.w12.weight, block.ffn.w3.weight]
        rate = MUON_BLOCK_RATE if muon else BLOCK_RATE
        train(matrices, loss, len(self.student_states), steps, rate, muon)

    @torch.no_grad()
    def fit_last_norm(self, norm: Any) -> None:
        """Fit the last RMSNorm, and the coordinate that determines the norms of its outputs.

        An RMSNorm gives all hidden states the same norm, but those of a BERT differ: in
        all-MiniLM-L6-v2, 80 % of them have norms from 1.7 to 9.1, and large states dominate the
        embedding of a text. Outputs x of the block have norms proportional to n after the RMSNorm
        if one coordinate is |x| sqrt((R / n)^2 - 1), and its weight in the RMSNorm is 0. The
        coordinate that is least important for the teacher is replaced in this way, if the error
        without it is smaller than the error of equal norms.

        Args:
            norm: RMSNorm after the block, which is the last one of the student.
        """
        block = self.block
        student_states = self.student_states[: self.num_fit_batches]
        target = _flat(self.teacher_outputs[: self.num_fit_batches])
        states = _flat([hidden + block.wo(self._attend(hidden)) for hidden in student_states])
        activations = self._activations(_normalize(states))
        norm.weight.fill_(1)

        coordinate = int(target.square().mean(0).argmin())
        target_norms = target.norm(dim=-1, keepdim=True)
        if target[:, coordinate].square().mean() < target_norms.var():
            norm.weight[coordinate] = 0
            outputs = (states + activations @ block.ffn.w3.weight.T) * norm.weight
            largest = float(np.quantile(target_norms.cpu(), NORM_QUANTILE))
            target_norms = target_norms.clamp(max=largest)
            ratios = largest / target_norms
            values = outputs.norm(dim=-1, keepdim=True) * (ratios.square() - 1).sqrt()

            # An error of the coordinate matters in proportion to the norm of the state.
            values = target_norms * (values - states[:, coordinate, None])
            block.ffn.w3.weight[coordinate] = ridge(target_norms * activations, values)[0]

        # One factor for all hidden states has the smallest squared error.
        outputs = _flat([norm(self.run(hidden)) for hidden in student_states])
        norm.weight *= best_scale(outputs.flatten(), target.flatten())

    @torch.no_grad()
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the block, (B, L, D)."""
        hidden = hidden + self.block.wo(self._attend(hidden))
        return hidden + self.block.ffn(self.block.ffn_norm(hidden))

    def _activations(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the down projection for normalized hidden states, (..., F)."""
        gate, value = self.block.ffn.w12(inputs).chunk(2, dim=-1)
        return F.silu(gate) * value

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries, rotated keys, and values, (B, H, L, K) each."""
        length = hidden.shape[1]
        positions = torch.arange(length, device=hidden.device)[None]
        rotations = rotary_embeddings(self.block.config, positions, length)
        return self.block.project(hidden, rotations)

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of all heads before `wo`, (B, L, D)."""
        return _merge(F.scaled_dot_product_attention(*self._project(hidden)))

    def _attention_loss(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the mean KL divergence from the attention of the teacher over all rows.

        Args:
            index: Index of the batch.
            logits: Attention logits of the student, (B, H, L, L).
        """
        # Logarithms remain exact for probabilities that are too small for float32.
        with torch.no_grad():
            teacher_logits = self.teacher.attention_logits(self.layer, self.teacher_inputs[index])
            target = teacher_logits.log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True)
        return divergence.sum(-1).mean()


def train(
    weights: Sequence[nn.Parameter],
    loss: Callable[[int], torch.Tensor],
    batch_count: int,
    steps: int,
    learning_rate: float,
    muon: bool = False,
) -> None:
    """Minimize a loss with Adam or Muon, warmup and a cosine decay.

    Args:
        weights: Matrices to train.
        loss: Function that returns the loss of the batch with an index.
        batch_count: Number of batches, which are used in a fixed random order.
        steps: Number of steps.
        learning_rate: Largest learning rate, relative to the root mean square of a matrix.
        muon: Whether to use Muon instead of Adam.

    Raises:
        UserError: If `muon` is set, and torch has no Muon.
    """
    if not steps:
        return

    # The optimizers change every value by about the learning rate, so it is relative to the size
    # of the values.
    groups = []
    for weight in weights:
        scale = float(weight.detach().square().mean().sqrt())
        groups.append({"params": [weight], "lr": learning_rate * scale})
    optimizer = (
        muon_optimizer(groups, learning_rate)
        if muon
        else torch.optim.Adam(groups, betas=(0.9, 0.98))
    )

    def schedule(step: int) -> float:
        return min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    generator = np.random.default_rng(0)
    order: list[int] = []
    for _ in range(steps):
        # Every batch is used once before the next permutation starts.
        if not order:
            order = generator.permutation(batch_count).tolist()
        value = loss(order.pop())
        # Unlike `backward`, this leaves the other parameters of the model without gradients.
        gradients = torch.autograd.grad(value, weights)
        for weight, gradient in zip(weights, gradients):
            weight.grad = gradient
        optimizer.step()
        scheduler.step()

    # The student must not start its distillation with these gradients.
    for weight in weights:
        weight.grad = None


def order_by_energy(
    query: torch.Tensor, key: torch.Tensor, inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform queries and keys of each head so that RoPE changes their products least.

    The products do not change if both are multiplied by a matrix and its inverse. Here the
    dimensions of a head become the singular directions of its products. RoPE rotates the last pairs
    of dimensions slowest; they get the directions with the largest values on the data.

    Args:
        query: Rows of the queries, (H, K, D).
        key: Rows of the keys, (H, K, D).
        inputs: Normalized hidden states, (T, D).

    Returns:
        Rows of the queries and of the keys, (H, K, D) each.
    """
    # The products are inputs @ query.T @ key @ inputs.T. The SVD of query.T @ key by two QR
    # decompositions needs (K, K) matrices only instead of (D, D).
    inputs = inputs.double()
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for head_query, head_key in zip(query.double(), key.double()):
        query_basis, query_factor = torch.linalg.qr(head_query.T)
        key_basis, key_factor = torch.linalg.qr(head_key.T)
        left, values, right = torch.linalg.svd(query_factor @ key_factor.T)
        new_query = (query_basis @ left * values.sqrt()).T
        new_key = (key_basis @ right.T * values.sqrt()).T

        energy = (inputs @ new_query.T).std(0) * (inputs @ new_key.T).std(0)
        order = energy.argsort()
        rows.append((new_query[order].float(), new_key[order].float()))
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def ridge(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the weight W of a linear layer with inputs @ W.T near targets, (E, D) float32.

    Args:
        inputs: Inputs, (T, D).
        targets: Targets, (T, E).
    """
    # The normal equations need (D, D) matrices only, and lose half of the digits: hence float64.
    inputs = inputs.double()
    products = inputs.T @ inputs
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    return torch.linalg.solve(products, inputs.T @ targets.double()).T.float()


def best_scale(states: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the factor (..., 1) that brings hidden states (..., D) nearest to a target."""
    products = (states * target).sum(-1, keepdim=True)
    return products / states.square().sum(-1, keepdim=True)


def unexplained_variance(student_states: Batches, teacher_states: Batches) -> float:
    """Return the fraction of the variance of the teacher that the student does not explain.

    The hidden state of the student for a token is scaled by the factor with the least error.

    Args:
        student_states: Hidden states of the student, (B, L, D) per batch.
        teacher_states: Hidden states of the teacher, (B, L, D) per batch.
    """
    states = _flat(student_states)
    target = _flat(teacher_states)
    error = (states * best_scale(states, target) - target).square().sum()
    return float(error / (target - target.mean(0)).square().sum())


def equal_lengths(
    tokens: Sequence[np.ndarray], token_count: int, batch_tokens: int = BATCH_TOKENS
) -> Iterator[torch.Tensor]:
    """Yield batches of texts of equal length, (B, L) int64.

    Args:
        tokens: Token IDs of texts.
        token_count: Number of tokens of all batches.
        batch_tokens: Number of tokens of a batch.
    """
    # Texts wait for others of their length, in a random order because files may be sorted.
    order = np.random.default_rng(0).permutation(len(tokens))
    waiting: dict[int, list[np.ndarray]] = {}
    for index in order:
        ids = tokens[index]
        rows = waiting.setdefault(len(ids), [])
        rows.append(ids)
        if len(rows) * len(ids) >= batch_tokens:
            yield torch.from_numpy(np.stack(waiting.pop(len(ids))).astype(np.int64))
            token_count -= len(rows) * len(ids)
            if token_count <= 0:
                return
    # All texts have been read: the incomplete batches are used, too.
    for rows in waiting.values():
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def _flat(batches: Batches) -> torch.Tensor:
    """Concatenate batches to (T, D)."""
    return torch.cat([batch.flatten(0, -2) for batch in batches])


def _merge(heads: torch.Tensor) -> torch.Tensor:
    """Concatenate heads, (B, H, L, K), to (B, L, D)."""
    return heads.transpose(1, 2).flatten(-2)


def _normalize(states: torch.Tensor) -> torch.Tensor:
    """Return hidden states after an RMSNorm with weight 1, (..., D)."""
    return F.rms_norm(states, states.shape[-1:], eps=1e-6)
