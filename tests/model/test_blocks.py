"""Test pre-training with compiled blocks.

Compiled blocks run in every step and change neither the losses nor the weight names. The complete
model is not compiled.
"""

from functools import partial

import pytest
import torch
from helpers.pretrain_runs import (  # noqa: F401
    Killed,
    arguments_of,
    log_of,
    make_corpus,
    run_of,
    signaled,
)
from safetensors.torch import load_file

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.packing import compile_blocks, uncompile_blocks
from neobert.pretraining import command as pretrain


def count_compiled_calls(monkeypatch):
    """Replace the compiler backend, and return a list with one graph per call of compiled code."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(graph)
            return graph(*args)

        return run

    monkeypatch.setattr(pretrain, "compile_blocks", partial(compile_blocks, backend=backend))
    return calls


@pytest.mark.slow
def test_compiled_run_matches_eager_run(corpus, tmp_path, monkeypatch):
    """Runs with and without compiled blocks have the same losses and weights."""
    torch._dynamo.reset()
    calls = count_compiled_calls(monkeypatch)
    run_of(arguments_of(corpus, tmp_path / "eager", max_steps=3, save_steps=3))
    assert not calls

    run_of(arguments_of(corpus, tmp_path / "compiled", max_steps=3, save_steps=3, compile="true"))
    assert len(calls) >= 3 * 2

    # Compiled blocks use RoPE with real numbers, which rounds differently from RoPE with complex
    # numbers.
    for eager, compiled in zip(
        log_of(tmp_path / "eager"), log_of(tmp_path / "compiled"), strict=True
    ):
        assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-4)

    eager, compiled = (
        load_file(tmp_path / name / "model.safetensors") for name in ("eager", "compiled")
    )
    assert eager.keys() == compiled.keys()
    for name, weight in eager.items():
        torch.testing.assert_close(compiled[name], weight, atol=1e-3, rtol=0, msg=name)


@pytest.mark.slow
def test_run_resumes_with_compiled_blocks(corpus, tmp_path, monkeypatch):
    """A run that started without compilation may be resumed with `compile`."""
    torch._dynamo.reset()
    calls = count_compiled_calls(monkeypatch)
    with pytest.raises(Killed), signaled(3):
        run_of(arguments_of(corpus, tmp_path, max_steps=4, save_steps=2))
    assert not calls

    # The resumed run has two steps, with two blocks each.
    run_of(arguments_of(corpus, tmp_path, max_steps=4, save_steps=2, compile="true"))
    assert len(calls) >= 2 * 2


def test_uncompile_blocks():
    """`uncompile_blocks` restores blocks that `compile_blocks` compiled.

    Compilation does not change the names of the weights.
    """
    model = NeoBERTForMaskedLM(
        NeoBERTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
        )
    )
    names = list(model.state_dict())
    blocks = model.model.transformer_encoder
    assert compile_blocks(model, backend="eager") is model and list(model.state_dict()) == names
    assert all(block._compiled_call_impl is not None for block in blocks)
    uncompile_blocks(model)
    assert all(block._compiled_call_impl is None for block in blocks)


@pytest.mark.parametrize(
    "option, value", [("torch_compile", "true"), ("torch_compile_backend", "inductor")]
)
def test_compiling_the_complete_model_is_rejected(corpus, tmp_path, capsys, option, value):
    """Options of Trainer that compile the complete model are rejected before the output is created.

    The graph of the complete model has no kernel for packed batches, so training was three times
    slower than without compilation.
    """
    from neobert.cli import main

    assert main(["pretrain", *arguments_of(corpus, tmp_path / "out", **{option: value})]) == 2
    message = capsys.readouterr().err
    assert f"`{option}` compiles the complete model" in message and "Pass --compile" in message
    assert not (tmp_path / "out").exists()
