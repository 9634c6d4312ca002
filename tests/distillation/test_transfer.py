"""Tests of `--init-from-teacher`: formulas and fits of the block transfer, and complete runs."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoTokenizer, BertConfig, BertModel

from benchmarks import pruned_teacher
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.cli import main as command
from neobert.common.errors import UserError
from neobert.distillation.transfer import (
    BlockTransfer,
    TeacherLayers,
    best_scale,
    default_layers,
    equal_lengths,
    initialize_blocks,
    order_by_energy,
    ridge,
    train,
    unexplained_variance,
)
from neobert.modeling_neobert import rotary_embeddings
from neobert.training.muon import warn_if_muon_is_slow


SIZE = dict(hidden_size=32, num_attention_heads=4)


def bert(layers=3, seed=3, **changes):
    """Return a small BERT with large weights, so that layers and positions affect the output."""
    torch.manual_seed(seed)
    values = {**SIZE, "intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 200}
    model = BertModel(BertConfig(**{**values, "num_hidden_layers": layers, **changes})).eval()

    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embeddings" not in name:
            parameter.data.mul_(8)
        elif "embeddings" in name and parameter.dim() == 2:
            parameter.data.mul_(20)

    return model


def encoder_of(model):
    """Return an object that has the transformer at the same path as a SentenceTransformer."""

    class Module:
        auto_model = model

    return [Module()]


def student(layers=2, inner=72, **changes):
    """Return a small NeoBERT with the teacher's hidden size and random weights."""
    torch.manual_seed(5)
    values = {**SIZE, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": 200}
    return NeoBERTModel(NeoBERTConfig(**{**values, **changes})).eval()


def token_batches(count=24, length=12, rows=8, seed=1):
    """Return batches of random token ids, (rows, L), of three lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, 200, (rows, length + i % 3), generator=generator) for i in range(count)
    ]


@pytest.mark.parametrize(
    "count, kept, layers",
    [(6, 4, [0, 1, 4, 5]), (6, 3, [0, 1, 5]), (12, 5, [0, 1, 2, 10, 11]), (2, 2, [0, 1])],
)
def test_the_lowest_and_the_highest_layers_are_kept(count, kept, layers):
    assert default_layers(count, kept) == layers


def test_teacher_layers_match_bert():
    """The layers of `TeacherLayers` compute the hidden states of the complete BERT."""
    model = bert()
    layers = TeacherLayers(encoder_of(model), [0, 1, 2])
    (ids,) = token_batches(1)
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states
        states = [layers.embed(ids)]
        for layer in layers.layers:
            states.append(layers.run(layer, states[-1]))
    for state, expected_state in zip(states, expected):
        torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-4)


def test_the_token_table_is_the_mean_over_positions():
    """The embedding of a token is averaged over the positions of the teacher."""
    model = bert(max_position_embeddings=8)
    layers = TeacherLayers(encoder_of(model), [0])
    with torch.no_grad():
        rows = [
            model.embeddings(torch.tensor([[7]]), position_ids=torch.tensor([[position]]))[0, 0]
            for position in range(8)
        ]
        torch.testing.assert_close(layers.token_table()[7], torch.stack(rows).mean(0))


def test_ridge_recovers_a_linear_map():
    torch.manual_seed(0)
    weight = torch.randn(5, 16)
    inputs = torch.randn(4000, 16)
    torch.testing.assert_close(ridge(inputs, inputs @ weight.T), weight, atol=5e-3, rtol=5e-3)


def test_order_by_energy_preserves_query_key_products():
    """`order_by_energy` preserves the products of queries and keys, and sorts their dimensions."""
    torch.manual_seed(0)
    query = torch.randn(4, 8, 32)
    key = torch.randn(4, 8, 32)
    inputs = torch.randn(500, 32) * torch.linspace(0.1, 3, 32)
    new_query, new_key = order_by_energy(query, key, inputs)
    torch.testing.assert_close(new_query.mT @ new_key, query.mT @ key, atol=1e-3, rtol=1e-3)
    energy = (inputs @ new_query.mT).std(1) * (inputs @ new_key.mT).std(1)
    assert (energy.diff(dim=1) >= -1e-3).all(), (
        "the dimensions are not in ascending order of energy"
    )


def test_the_best_scale_is_the_least_squares_factor():
    """Check the factor by a grid search, and that scaled states have no unexplained variance."""
    torch.manual_seed(0)
    states = torch.randn(6, 32)
    target = torch.randn(6, 32)

    factors = torch.linspace(-3, 3, 6001)
    errors = ((factors[:, None, None] * states - target) ** 2).sum(-1)
    nearest = factors[errors.argmin(0)]
    torch.testing.assert_close(best_scale(states, target)[:, 0], nearest, atol=2e-3, rtol=0)

    scaled = [torch.rand(4, 5, 1) * target.view(3, 2, 32)[:1].repeat(4, 3, 1)[:, :5]]
    assert unexplained_variance(scaled, [scaled[0] * 2]) < 1e-6


def test_equal_length_batches_stop_at_token_limit():
    generator = np.random.default_rng(0)
    tokens = [np.arange(n, dtype=np.int32) for n in generator.integers(3, 9, size=400)]
    batches = list(equal_lengths(tokens, 600, 64))
    assert all((batch == torch.arange(batch.shape[1])).all() for batch in batches)
    assert 600 <= sum(batch.numel() for batch in batches) < 600 + 72

    # With a large limit, the incomplete batches are used, too.
    all_batches = list(equal_lengths(tokens, 10**9, 64))
    assert sum(len(batch) for batch in all_batches) == 400


def test_train_uses_adam_with_relative_learning_rates():
    """The learning rate is relative to the root mean square of a matrix, which is 10 here."""
    weight = torch.nn.Parameter(torch.full((2, 2), 10.0))
    train([weight], lambda number: weight.sum(), 3, 30, 0.01)
    # Adam changes a value by the learning rate in each step if the gradient is constant.
    rates = [min(1, (i + 1) / 20) * 0.5 * (1 + math.cos(math.pi * i / 30)) for i in range(30)]
    torch.testing.assert_close(weight.data, torch.full((2, 2), 10 - 0.1 * sum(rates)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_train_uses_muon_with_relative_learning_rates():
    """Every update has the singular vectors of the gradient, and the size of Adam's."""
    torch.manual_seed(0)
    start = 10 * torch.randn(8, 8).double()
    gradient = torch.randn(8, 8).double()
    weight = torch.nn.Parameter(start.clone())
    train([weight], lambda number: (weight * gradient).sum(), 3, 30, 0.01, muon=True)

    # The Newton-Schulz iteration of Muon changes singular values to values between 0.7 and 1.2. An
    # orthogonal matrix of this size has a root mean square of 8 ** -0.5, that of an update is 0.2.
    left, _, right = torch.linalg.svd(gradient)
    rates = [min(1, (i + 1) / 20) * 0.5 * (1 + math.cos(math.pi * i / 30)) for i in range(30)]
    step = 0.01 * float(start.square().mean().sqrt()) * 0.2 * 8**0.5 * sum(rates)
    update = left.T @ (start - weight.detach()) @ right.T / step
    torch.testing.assert_close(update.diagonal(), torch.ones(8).double(), atol=0.35, rtol=0)
    assert (update - update.diagonal().diag()).abs().max() < 0.1


def transfer_of():
    """Return the transfer of layer 0 to the first block of a student, with hidden states."""
    model = bert()
    layers = TeacherLayers(encoder_of(model), [0])
    student_model = student(1, 96)
    batches = token_batches(30)

    with torch.no_grad():
        student_model.encoder.weight.copy_(layers.token_table())
        student_states = [student_model.encoder(ids) for ids in batches]
        inputs = [layers.embed(ids) for ids in batches]
        outputs = [layers.run(layers.layers[0], hidden) for hidden in inputs]

    block = student_model.transformer_encoder[0]
    return BlockTransfer(block, layers.layers[0], layers, student_states, inputs, outputs)


def test_fitted_values_match_the_teacher():
    """The values in the interleaved rows of `qkv`, (H, 3, K), reproduce those of the teacher."""
    transfer = transfer_of()
    # The embeddings of the student lack the teacher's positions. The hidden states of the teacher
    # remove this error.
    transfer.student_states = transfer.teacher_inputs
    transfer.fit_attention()

    hidden = transfer.student_states[0]
    _, _, values = transfer.block.project(
        hidden, rotary_embeddings(transfer.block.config, torch.arange(hidden.shape[1])[None], 12)
    )

    with torch.no_grad():
        expected = transfer.teacher._split(transfer.layer.attention.self.value(hidden))
    error = (values - expected).square().mean() / expected.square().mean()
    assert error < 0.02


def test_every_transfer_step_reduces_the_error():
    """Each step of the transfer reduces the error, and attention training leaves the values."""
    transfer = transfer_of()

    def variance_of_errors():
        return unexplained_variance(
            [transfer.run(h) for h in transfer.student_states], transfer.teacher_outputs
        )

    def mean_attention_loss():
        total = 0.0
        with torch.no_grad():
            for index, hidden in enumerate(transfer.student_states):
                query, key, _ = transfer._project(hidden)
                logits = query @ key.mT * transfer.block.scaling
                total += float(transfer._attention_loss(index, logits))
        return total / len(transfer.student_states)

    variance_before_fit = variance_of_errors()
    transfer.fit_attention()
    loss_after_fit = mean_attention_loss()
    values = transfer.block.qkv.weight.detach().clone().view(4, 3, 8, 32)[:, 2]

    transfer.train_attention(40)
    assert mean_attention_loss() < 0.95 * loss_after_fit
    torch.testing.assert_close(transfer.block.qkv.weight.view(4, 3, 8, 32)[:, 2], values)

    transfer.fit_outputs()
    variance_after_fit = variance_of_errors()
    assert variance_after_fit < 0.6 * variance_before_fit
    transfer.train_block(60)
    # Most of the remaining error is that of random attention, which RoPE cannot reproduce.
    assert variance_of_errors() < 0.99 * variance_after_fit


def test_the_feed_forward_replaces_states_that_the_teacher_drops():
    """If the target does not depend on the states, the output is long enough to hide them."""
    torch.manual_seed(0)
    transfer = transfer_of()
    states = torch.randn(2000, 32)
    activations = torch.randn(2000, 96)
    target = activations @ torch.randn(96, 32)

    weight = transfer._fit_down_projection(activations, states, target)
    unexplained = unexplained_variance([states + activations @ weight.T], [target])
    # With outputs of norm c times the states, the error of a direction is at least
    # 1 / (1 + c ** 2), here for the longest of the outputs.
    assert unexplained == pytest.approx(1 / (1 + 4**2), rel=0.3)


def test_states_are_kept_where_they_are_the_target():
    """A target that the states have already needs no output of the feed-forward."""
    torch.manual_seed(0)
    states = torch.randn(2000, 32)
    activations = torch.randn(2000, 96)
    target = 3 * states + 0.1 * torch.randn(2000, 32)
    weight = transfer_of()._fit_down_projection(activations, states, target)
    assert weight.abs().max() < 0.01


@pytest.mark.parametrize("factor", [1, 100])
def test_the_block_loss_is_the_unexplained_variance(monkeypatch, factor):
    """The loss is the squared error over the variance, plus the divergence of the attention.

    States that are longer than 4 times the states before the block are penalized by the square of
    the logarithm.
    """
    transfer = transfer_of()
    transfer.fit_attention()
    transfer.fit_outputs()
    with torch.no_grad():
        transfer.block.wo.weight *= factor
        transfer.block.ffn.w3.weight *= factor
    losses = []
    monkeypatch.setattr(
        "neobert.distillation.transfer.train",
        lambda weights, loss, *rest: losses.append(loss(3).detach()),
    )
    transfer.train_block(10)

    states = transfer.run(transfer.student_states[3])
    target = transfer.teacher_outputs[3]
    scale = (states * target).sum(-1, keepdim=True) / states.pow(2).sum(-1, keepdim=True)
    outputs = torch.cat([hidden.flatten(0, 1) for hidden in transfer.teacher_outputs])
    variance = (outputs - outputs.mean(0)).pow(2).sum() / (len(outputs) - 1) / outputs.shape[1]
    expected = (scale * states - target).pow(2).mean() / variance

    growth = states.norm() / transfer.student_states[3].norm()
    assert (growth > 4) == (factor > 1)
    if growth > 4:
        expected += (growth / 4).log() ** 2
    with torch.no_grad():
        query, key, _ = transfer._project(transfer.student_states[3])
        expected += transfer._attention_loss(3, query @ key.mT * transfer.block.scaling)
    torch.testing.assert_close(losses[0], expected)


def transfer_with_norms(target_of):
    """Return a fitted transfer with other targets.

    Args:
        target_of: Function that returns the targets of a batch for its hidden states before and
            after the block, (B, L, 32) each.
    """
    transfer = transfer_of()
    for hidden in transfer.student_states:
        hidden[..., 5] += 10
    transfer.fit_attention()
    transfer.fit_outputs()
    # The states before the feed-forward are not small at the coordinate that is replaced.
    transfer.block.wo.weight.data[5] = 0

    transfer.teacher_outputs = [
        target_of(hidden, transfer.run(hidden)) for hidden in transfer.student_states
    ]
    return transfer


def test_the_last_norm_reproduces_different_norms():
    """The coordinate that the teacher does not use determines the norms of hidden states."""

    def target_of(hidden, output):
        output[..., 5] = 0
        return F.normalize(output, dim=-1) * (2 + torch.tanh(hidden[..., :1]))

    transfer = transfer_with_norms(target_of)
    norm = torch.nn.RMSNorm(32, eps=1e-6)
    before = transfer.block.ffn.w3.weight.detach().clone()
    transfer.fit_last_norm(norm)

    changed = (transfer.block.ffn.w3.weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [5]
    assert norm.weight[5] == 0

    outputs = torch.cat(
        [norm(transfer.run(h)).flatten(0, 1) for h in transfer.student_states]
    ).detach()
    target = torch.cat([hidden.flatten(0, 1) for hidden in transfer.teacher_outputs])
    norms = torch.stack([outputs.norm(dim=1), target.norm(dim=1)])
    assert torch.corrcoef(norms)[0, 1] > 0.9

    # The best outputs of equal norm have this squared error.
    equal = target.norm(dim=1).var() * len(target)
    assert (outputs - target).square().sum() < 0.3 * equal
    torch.testing.assert_close((outputs * target).sum(), outputs.square().sum())


def test_the_last_norm_keeps_equal_norms():
    """Without different norms, the outputs of the last RMSNorm have the norm of the targets."""
    transfer = transfer_with_norms(lambda hidden, output: 3 * F.normalize(output, dim=-1))
    norm = torch.nn.RMSNorm(32, eps=1e-6)
    before = transfer.block.ffn.w3.weight.detach().clone()
    transfer.fit_last_norm(norm)

    assert torch.equal(transfer.block.ffn.w3.weight, before)
    torch.testing.assert_close(norm.weight.detach(), norm.weight[:1].detach().expand(32))
    outputs = torch.cat([norm(transfer.run(h)).flatten(0, 1) for h in transfer.student_states])
    target = torch.cat([hidden.flatten(0, 1) for hidden in transfer.teacher_outputs])
    torch.testing.assert_close((outputs * target).sum(), outputs.square().sum())


def test_the_attention_loss_is_the_kl_divergence():
    transfer = transfer_of()
    hidden = transfer.teacher_inputs[0]
    with torch.no_grad():
        teacher = transfer.teacher.attention_logits(transfer.layer, hidden)
        logits = torch.randn_like(teacher)
        p, q = teacher.softmax(-1), logits.softmax(-1)
        expected = (p * (p / q).log()).sum(-1).mean()
        torch.testing.assert_close(transfer._attention_loss(0, logits), expected)
        assert transfer._attention_loss(0, teacher) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("inner", [24, 96, 144])
def test_initialization_with_other_feed_forward_sizes(inner):
    """Students with a smaller or larger feed-forward start with hidden states of the teacher."""
    model = bert()
    layers = TeacherLayers(encoder_of(model), [0, 2])
    student_model = student(2, inner)
    batches = token_batches(20)
    initialize_blocks(student_model, layers, batches, steps=10)

    with torch.no_grad():
        hidden = layers.embed(batches[0])
        for layer in layers.layers:
            hidden = layers.run(layer, hidden)
        output = student_model(input_ids=batches[0]).last_hidden_state

    # A random teacher is harder to fit than a trained one, which uses fewer directions.
    cosine = F.cosine_similarity(output - output.mean((0, 1)), hidden - hidden.mean((0, 1)), dim=-1)
    assert cosine.mean() > (0.6 if inner > 24 else 0.5)


def test_teacher_with_more_embeddings_than_tokens():
    """The embeddings of a teacher may be padded to a multiple of 64 rows."""
    layers = TeacherLayers(encoder_of(bert(vocab_size=256)), [0])
    student_model = student(1)
    initialize_blocks(student_model, layers, token_batches(2), 0)
    expected = layers.token_table()[:200]
    torch.testing.assert_close(student_model.encoder.weight, expected)


def test_stored_embeddings_are_rounded_before_the_blocks_are_fitted():
    """The blocks are fitted on the embeddings that the saved student will have."""
    layers = TeacherLayers(encoder_of(bert()), [0])
    student_model = student(1)
    initialize_blocks(student_model, layers, token_batches(6), 0, torch.float8_e5m2)
    weight = student_model.encoder.weight.detach()
    assert torch.equal(weight.to(torch.float8_e5m2).float(), weight)


# ------------------------------------------------------------------------------------------------
# complete runs


def write_teacher(folder, tokenizer_dir, pooling="mean", **changes):
    """Save a small BERT sentence encoder, and return its directory."""
    model = bert(vocab_size=30522, **changes)
    model.save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder / "bert")
    parts = [modules.Transformer(str(folder / "bert")), modules.Pooling(32, pooling)]
    SentenceTransformer(modules=[*parts, modules.Normalize()]).save_pretrained(str(folder / "st"))
    return str(folder / "st")


def arguments_for(folder, teacher, *options):
    """Write the training texts, and return the arguments of a short run."""

    colors = "red green blue black white brown grey pink".split()
    animals = "cat dog bird fish horse mouse lion wolf".split()
    texts = folder / "texts.txt"
    lines = [f"a {c} {a} and {i % 7} more {a}s" for i, c in enumerate(colors) for a in animals]
    texts.write_text("\n".join(lines))

    config = json.dumps({**SIZE, "num_hidden_layers": 2, "intermediate_size": 96})
    arguments = [teacher, "--texts", str(texts), "--output", str(folder / "out")]
    arguments += ["--init-from-teacher", "--transfer-steps", "10", "--model-config", config]
    arguments += ["--max-length", "32", "--validation-percent", "20", "--max-steps", "2"]
    return [*arguments, *options]


def distill(folder, teacher, *options):
    return command(["distill", *arguments_for(folder, teacher, *options)])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_run_starts_from_the_layers_of_its_teacher(tmp_path, tokenizer_dir, pooling, caplog):
    """A run starts near its teacher, with mean pooling (E5, GTE) and with [CLS] pooling (BGE)."""
    teacher = write_teacher(tmp_path, tokenizer_dir, pooling)
    caplog.set_level("INFO", "neobert.distillation")
    assert distill(tmp_path, teacher, "--pooling", pooling) == 0
    assert "Block 1 from layer 2 of the teacher: the unexplained variance" in caplog.text

    figures = json.loads((tmp_path / "out" / "result.json").read_text())
    # A student with random blocks has a mean cosine of about 0.
    assert figures["comparison"]["initial_student"]["validation_cosine"] > 0.6

    card = (tmp_path / "out" / "README.md").read_text()
    assert "initialized from the layers 0, 2 of the teacher, with 10 training steps each" in card

    loaded = SentenceTransformer(str(tmp_path / "out"), trust_remote_code=True, device="cpu")
    assert loaded.encode(["a cat"]).shape == (1, 32)


def test_transfer_is_cached_in_work_directory(tmp_path, tokenizer_dir, monkeypatch):
    """A second run with the same `--work` directory reads the blocks from there.

    Blocks of another seed or another version of the algorithm are not used.
    """
    teacher = write_teacher(tmp_path, tokenizer_dir)
    work = ["--work", str(tmp_path / "work")]
    assert distill(tmp_path, teacher, *work) == 0
    first = json.loads((tmp_path / "out" / "result.json").read_text())

    module = "neobert.distillation.command.initialize_blocks"
    monkeypatch.setattr(module, lambda *arguments: pytest.fail("the transfer was repeated"))
    (tmp_path / "out").rename(tmp_path / "first")

    assert distill(tmp_path, teacher, *work) == 0
    second = json.loads((tmp_path / "out" / "result.json").read_text())
    assert second["comparison"] == first["comparison"]

    monkeypatch.undo()
    monkeypatch.setattr("neobert.distillation.command.TRANSFER_VERSION", 0)
    (tmp_path / "out").rename(tmp_path / "second")
    assert distill(tmp_path, teacher, *work) == 0
    assert len(list((tmp_path / "work").rglob("blocks-*.safetensors"))) == 2

    # Gates that the teacher does not have are random.
    (tmp_path / "out").rename(tmp_path / "third")
    assert distill(tmp_path, teacher, *work, "--seed", "7") == 0
    assert len(list((tmp_path / "work").rglob("blocks-*.safetensors"))) == 3


def test_hidden_states_are_trained_for_every_token(tmp_path, tokenizer_dir):
    """With `--hidden-state-weight`, the hidden states become closer to the teacher's."""
    teacher = write_teacher(tmp_path, tokenizer_dir)
    losses = {}
    errors = {}

    for weight in ("0", "5"):
        options = ["--hidden-state-weight", weight, "--learning-rate", "3e-3"]
        options += ["--max-steps", "30", "--logging-steps", "30"]
        assert distill(tmp_path, teacher, *options, "--work", str(tmp_path / "work")) == 0
        figures = json.loads((tmp_path / "out" / "result.json").read_text())
        losses[weight] = figures["losses"][-1]

        student = SentenceTransformer(str(tmp_path / "out"), trust_remote_code=True, device="cpu")
        hidden, target = (
            model.encode(["a grey wolf"], output_value="token_embeddings")[0]
            for model in (student, SentenceTransformer(teacher, device="cpu"))
        )
        card = (tmp_path / "out" / "README.md").read_text()
        assert ("5 x the relative squared error of the last hidden states" in card) == (
            weight == "5"
        )
        errors[weight] = float((hidden - target).norm() / target.norm())
        (tmp_path / "out").rename(tmp_path / weight)

    assert "hidden_states" not in losses["0"] and losses["5"]["hidden_states"] > 0
    assert errors["5"] < errors["0"] - 0.02, errors


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--teacher-layers", "0", "3"],
            "`teacher_layers` must be between 0 and 2, the layers of the teacher, got",
        ),
        (["--teacher-layers", "0", "1", "2"], "one layer per block of the student, 2, got 3"),
        (
            ["--model-config", json.dumps({**SIZE, "num_hidden_layers": 4})],
            "must be at most 3, the number of layers of the teacher, got 4",
        ),
        (
            ["--model-config", json.dumps({**SIZE, "num_hidden_layers": 2, "hidden_size": 16})],
            "`hidden_size` of the student must be 32, that of the teacher",
        ),
        (
            [
                "--model-config",
                json.dumps({**SIZE, "num_hidden_layers": 2, "num_attention_heads": 2}),
            ],
            "`num_attention_heads` of the student must be 4",
        ),
        (
            ["--model-config", json.dumps({**SIZE, "num_hidden_layers": 2, "hidden_act": "gelu"})],
            "must have SwiGLU, RMSNorm and RoPE",
        ),
        (["--pooling", "cls"], "`pooling` must be mean, that of the teacher"),
        (["--embeddings-from-teacher"], "Pass one of them"),
    ],
)
def test_incompatible_student_options_are_refused(
    tmp_path, tokenizer_dir, capsys, options, message
):
    """Options that do not fit the teacher end with an error, and no model is written."""
    teacher = write_teacher(tmp_path, tokenizer_dir)
    assert distill(tmp_path, teacher, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_hidden_states_of_another_size_are_refused(tmp_path, tokenizer_dir, capsys):
    """`--hidden-state-weight` with a student of another hidden size ends with an error."""
    teacher = write_teacher(tmp_path, tokenizer_dir)
    (tmp_path / "texts.txt").write_text("\n".join(f"the text number {i}" for i in range(900)))
    arguments = ["distill", teacher, "--texts", str(tmp_path / "texts.txt")]
    arguments += ["--output", str(tmp_path / "out"), "--hidden-state-weight", "1"]
    size = {**SIZE, "hidden_size": 16, "num_hidden_layers": 1}

    assert command([*arguments, "--model-config", json.dumps(size)]) == 2
    assert "vocabulary and hidden_size (32)" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_muon_is_refused_before_the_texts_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    monkeypatch.setattr("neobert.distillation.command.read_texts", None)
    (tmp_path / "texts.txt").write_text("a text\n")
    arguments = ["absent/teacher", "--texts", str(tmp_path / "texts.txt"), "--muon"]
    assert command(["distill", *arguments, "--output", str(tmp_path / "out")]) == 2
    assert "--muon needs torch 2.9 or newer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "units, device, warns",
    [
        (["AVX2", "AVX-512", "VNNI"], "cpu", True),
        (["AVX2", "AVX512-BF16"], "cpu", False),
        (["dot product", "bf16"], "cpu", False),
        ([], "cpu", False),
        (["AVX2"], "cuda", False),
    ],
)
def test_muon_warns_about_processors_without_bfloat16(units, device, warns, monkeypatch, caplog):
    monkeypatch.setattr("neobert.training.muon.processor_units", lambda: units)
    warn_if_muon_is_slow(torch.device(device))
    assert ("--muon is slow on this processor" in caplog.text) == warns


def test_contradictory_options_are_refused(capsys):
    for options, message in (
        (["--init-from-teacher", "--init-from", "model"], "Remove one of them"),
        (["--teacher-layers", "0"], "requires --init-from-teacher"),
    ):
        arguments = ["distill", "teacher", "--texts", "t.txt", "--output", "o", *options]
        assert command(arguments) == 2
        assert message in capsys.readouterr().err


def test_unsupported_teacher_architectures_are_refused():
    model = bert(hidden_act="relu")
    with pytest.raises(UserError, match="needs a BERT teacher with GELU and learned positions"):
        TeacherLayers(encoder_of(model), [0])


# ------------------------------------------------------------------------------------------------
# benchmarks/pruned_teacher.py


def test_pruned_teacher_training(tmp_path, tokenizer_dir):
    """The pruned teacher keeps layers 0 and 2, and its training improves its embeddings."""
    teacher = write_teacher(tmp_path, tokenizer_dir)
    options = ["--teacher-layers", "0", "2", "--freeze-embeddings", "--learning-rate", "1e-3"]
    options += ["--max-steps", "40", "--eval-steps", "40"]
    assert pruned_teacher.main(arguments_for(tmp_path, teacher, *options)) == 0

    teacher_model = SentenceTransformer(teacher, device="cpu")[0].auto_model
    trained = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    bert = trained[0].auto_model
    assert len(bert.encoder.layer) == bert.config.num_hidden_layers == 2
    assert torch.equal(
        bert.embeddings.word_embeddings.weight, teacher_model.embeddings.word_embeddings.weight
    )

    # The second layer is layer 2 of the teacher: its weights are much nearer to those of layer 2
    # than to those of the other layers, and they have changed.
    weights = [
        layer.intermediate.dense.weight
        for layer in (bert.encoder.layer[1], *teacher_model.encoder.layer)
    ]
    distances = [float((weights[0] - weight).detach().norm()) for weight in weights[1:]]
    assert 0 < distances[2] < 0.2 * min(distances[:2])

    comparison = json.loads((tmp_path / "out" / "result.json").read_text())["comparison"]
    assert (
        comparison["student"]["validation_cosine"]
        > comparison["initial_student"]["validation_cosine"]
    )


def test_forward_in_groups_matches_single_batch(tmp_path, tokenizer_dir):
    """Groups of texts of similar length give the embeddings of one batch, with less padding."""
    model = SentenceTransformer(write_teacher(tmp_path, tokenizer_dir), device="cpu").eval()
    texts = [" ".join(["a bird"] * (7 * i % 20 + 1)) for i in range(40)]
    features = model.preprocess(texts)
    expected = model(dict(features))["sentence_embedding"]
    padding_counts = []

    def forward(group):
        padding_counts.append(int((group["attention_mask"] == 0).sum()))
        return transformer_forward(group)

    transformer_forward = model[0].forward

    output = pruned_teacher.forward_in_groups(forward, features)
    embeddings = model[2](model[1](output))["sentence_embedding"]

    assert (embeddings - expected).abs().max() < 1e-5
    assert sum(padding_counts) < 0.5 * int((features["attention_mask"] == 0).sum())
