"""Test compiled blocks in training.

They run in every step, keep numbers and weight names unchanged, and the whole model is not
compiled.
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers.pretrain_runs import arguments_of, log_of, make_corpus, run_of  # noqa: F401
from safetensors.torch import load_file

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.packing import compile_blocks, uncompile_blocks
from neobert.pretraining import command as pretrain


def count_compiled_calls(monkeypatch):
    """Replaces the compiler by one that counts the calls of what it makes; returns the list of
    their numbers of tokens."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(graph)
            return graph(*args)

        return run

    monkeypatch.setattr(pretrain, "compile_blocks", partial(compile_blocks, backend=backend))
    return calls


@pytest.mark.slow
def test_a_compiled_run_has_the_numbers_of_an_eager_one(corpus, tmp_path, monkeypatch):
    torch._dynamo.reset()
    calls = count_compiled_calls(monkeypatch)
    run_of(arguments_of(corpus, tmp_path / "eager", max_steps=3, save_steps=3))
    assert not calls
    run_of(arguments_of(corpus, tmp_path / "compiled", max_steps=3, save_steps=3, compile="true"))
    assert len(calls) >= 3 * 2
    # The real form of RoPE, which compilers take, rounds otherwise than the complex one.
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


def test_a_run_may_be_continued_compiled(corpus, tmp_path, monkeypatch):
    calls = count_compiled_calls(monkeypatch)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as context:
        context.setattr(pretrain.Pretraining, "save", Mock(side_effect=KeyboardInterrupt))
        run_of(arguments_of(corpus, tmp_path, max_steps=4, save_steps=2))
    assert not calls
    run_of(arguments_of(corpus, tmp_path, max_steps=4, save_steps=2, compile="true"))


def test_compilation_is_taken_back():
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
def test_the_complete_model_is_not_compiled(corpus, tmp_path, capsys, option, value):
    """Whose graph has no kernel for packed batches: it was three times slower than no
    compilation."""
    from neobert.cli import main

    assert main(["pretrain", *arguments_of(corpus, tmp_path / "out", **{option: value})]) == 2
    message = capsys.readouterr().err
    assert f"`{option}` compiles the complete model" in message and "Pass --compile" in message
    assert not (tmp_path / "out").exists()
