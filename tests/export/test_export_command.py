"""Test `neobert export`.

Targets, refusals, the files it reads, pooling, and the comparison with torch.
"""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neobert import NeoBERTForMaskedLM, NeoBERTForMultipleChoice
from neobert import cli as __main__
from neobert.common.errors import UserError
from neobert.conversion import verify
from neobert.export import check, command, folder
from neobert.export.check import EngineAgreement, Reference
from neobert.export.graph import Graph
from neobert.export.options import ModelOptions
from neobert.export.source import Pooling, open_source


def opened(path, **options):
    with open_source(ModelOptions(folder=str(path), output="out", **options)) as source:
        return source


# ------------------------------------------------------------------------------------------------
# command


def test_a_bad_command_is_one_sentence(capsys, tmp_path):
    assert __main__.main(["export", "tflite", "model", "out"]) == 2
    assert capsys.readouterr().err == (
        "neobert export: TARGET must be one of gguf, onnx, openvino, got 'tflite'.\n"
    )
    assert __main__.main(["export"]) == 2
    assert "got nothing." in capsys.readouterr().err
    pytest.importorskip("openvino", reason="needs the extra openvino")
    assert __main__.main(["export", "openvino", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(
        f"neobert export: there is no {tmp_path}/none. Download a model of the Hub first"
    )
    assert not list(tmp_path.iterdir())


def test_a_missing_engine(monkeypatch):
    monkeypatch.setitem(
        command.TARGETS, "onnx", command.Target("onnx", "onnx", ("no_such_engine",))
    )
    with pytest.raises(ImportError, match=r"pip install no-such-engine`, or .* '.\[onnx\]'"):
        command.main(["onnx", "model", "out"])


# ------------------------------------------------------------------------------------------------
# source


def test_a_sentence_encoder(sentence_folder):
    source = opened(sentence_folder)
    assert (source.head.option, source.max_length, source.prompts["query"]) == ("base", 120, "a ")
    kinds = [type(module).__name__ for module in source.pooling.modules]
    assert kinds == ["Pooling", "Dense", "Normalize"]
    assert source.pooling.mode == "mean" and source.pooling.normalize
    state = load_file(sentence_folder / "2_Dense" / "model.safetensors")
    (dense,) = source.pooling.dense
    assert torch.equal(dense.linear.weight, state["linear.weight"])
    assert not source.config.unpad_inputs and not source.model.training


def test_prompts_that_do_not_count(sentence_folder, tmp_path):
    """A graph does not know where a prompt ends: it has no pooled output then, and the folder tells
    its readers."""
    source = opened(sentence_folder)
    left_out = replace(source, pooling=replace(source.pooling, include_prompt=False))
    both = ["last_hidden_state", "sentence_embedding"]
    assert Graph(source).outputs == Graph(replace(left_out, prompts={"query": ""})).outputs == both
    assert Graph(left_out).outputs == both[:1]
    (tmp_path / "tokenizer").mkdir()
    for exported, counts in ((source, True), (left_out, False)):
        place = tmp_path / str(counts)
        place.mkdir()
        folder._write_common(place, replace(exported, tokenizer_folder=tmp_path / "tokenizer"))
        pooling = json.loads((place / "1_Pooling" / "config.json").read_text())
        assert pooling["include_prompt"] is counts
        settings = json.loads((place / "config_sentence_transformers.json").read_text())
        assert settings["prompts"]["query"] == "a "


def test_the_head_is_what_the_weights_are(hub_folder):
    model_folder = hub_folder(NeoBERTForMaskedLM)
    assert opened(model_folder).head.option == "masked-lm"
    base = opened(model_folder, head="base")
    assert base.head.option == "base" and base.pooling is None
    expected = load_file(model_folder / "model.safetensors")[
        "model.transformer_encoder.1.qkv.weight"
    ]
    assert torch.equal(base.model.transformer_encoder[1].qkv.weight, expected)


def test_a_raw_checkpoint_is_converted_first(hub_folder, tmp_path, monkeypatch):
    model_folder = hub_folder(NeoBERTForMaskedLM)
    raw = tmp_path / "raw"
    shutil.copytree(model_folder, raw)
    (raw / "model.safetensors").unlink()
    torch.save(load_file(model_folder / "model.safetensors"), raw / "state_dict.pt")
    monkeypatch.setattr(verify, "verify", lambda folder, conversion, expected, scratch: expected)
    source, expected = opened(raw), opened(model_folder)
    assert source.head.option == "masked-lm"
    for actual, wanted in zip(source.model.parameters(), expected.model.parameters()):
        assert torch.equal(actual, wanted)


def test_what_cannot_be_exported(hub_folder, sentence_folder, tmp_path):
    with pytest.raises(UserError, match="multiple-choice models cannot be exported"):
        opened(hub_folder(NeoBERTForMultipleChoice))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="must be a NeoBERT, got a bert model"):
        opened(tmp_path / "bert")
    damaged = tmp_path / "damaged"
    shutil.copytree(hub_folder(), damaged)
    (damaged / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(UserError, match="lacks tensors of NeoBERTModel: encoder.weight, "):
        opened(damaged)
    other = tmp_path / "other"
    shutil.copytree(sentence_folder, other)
    modules = json.loads((other / "modules.json").read_text())
    for kinds, message in (
        ("Transformer, Pooling, LSTM", "last, got Transformer, Pooling, LSTM"),
        ("Transformer, Pooling, Normalize, Dense", "and Normalize last, got"),
    ):
        pairs = zip(modules, kinds.split(", "))
        changed = [{**part, "type": f"sentence_transformers.models.{kind}"} for part, kind in pairs]
        (other / "modules.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            opened(other)


# ------------------------------------------------------------------------------------------------
# pooling


def test_pooling_by_its_formulas():
    from sentence_transformers import models

    hidden, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    rows = [hidden[0, :3].numpy(), hidden[1].numpy()]
    weights = [np.arange(1, len(row) + 1)[:, None] for row in rows]
    expected = {
        "mean": [row.mean(0) for row in rows],
        "cls": [row[0] for row in rows],
        "lasttoken": [row[-1] for row in rows],
        "max": [row.max(0) for row in rows],
        "mean_sqrt_len_tokens": [row.sum(0) / np.sqrt(len(row)) for row in rows],
        "weightedmean": [(row * w).sum(0) / w.sum() for row, w in zip(rows, weights)],
    }
    for mode, vectors in expected.items():
        vectors = np.stack(vectors)
        pooling = Pooling(mode, True, (models.Pooling(3, mode),))
        assert np.allclose(pooling(hidden, mask).numpy(), vectors, atol=1e-6), mode
        normed = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        pooling = Pooling(mode, True, (*pooling.modules, models.Normalize()))
        assert np.allclose(pooling(hidden, mask).numpy(), normed, atol=1e-6), mode


# ------------------------------------------------------------------------------------------------
# check


@pytest.fixture(scope="module")
def reference(sentence_folder):
    source = opened(sentence_folder)
    return source, Reference(source)


def test_the_comparison_sees_one_wrong_token(reference):
    source, comparison = reference

    def run(ids, mask, spoil=None):
        with torch.no_grad():
            hidden = source.model(ids, attention_mask=mask).last_hidden_state.clone()
        vectors = source.pooling(hidden, mask)
        if spoil == "token":
            hidden[-1, 1] *= -1
        if spoil == "pooled":
            vectors[-1] *= -1
        if spoil == "padding":
            hidden[mask == 0] = float("nan")
            vectors = source.pooling(hidden.nan_to_num(), mask)
            return {"last_hidden_state": hidden.nan_to_num(1e3), "sentence_embedding": vectors}
        return {"last_hidden_state": hidden.numpy(), "sentence_embedding": vectors.numpy()}

    for spoil in (None, "padding"):
        agreement = comparison.agreement(partial(run, spoil=spoil))
        assert (agreement.token, agreement.pooled) == pytest.approx((1, 1), abs=1e-6)
    for spoil in ("token", "pooled"):
        worst = getattr(comparison.agreement(partial(run, spoil=spoil)), spoil)
        assert worst == pytest.approx(-1, abs=1e-6)
    with pytest.raises(UserError, match="last_hidden_state must have the shape .*, got nothing"):
        comparison.agreement(lambda ids, mask: {})


def test_a_cosine_that_is_not_a_number_is_the_worst():
    worst = check._worst([torch.tensor([0.9, float("nan")]), torch.tensor([0.8])])
    with pytest.raises(
        UserError, match="worst pooled cosine to torch must be at least 0.7, got nan"
    ):
        EngineAgreement(None, worst).check("fp16", 0.9, 0.7)
    assert check._worst([torch.tensor([0.9]), torch.tensor([0.8, 0.95])]) == pytest.approx(0.8)


def test_an_export_needs_a_tokenizer(hub_folder, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["export", "onnx", str(hub_folder()), str(output), "--tokenizer", "none"]
    assert __main__.main(command) == 2 and not output.exists()
    assert "`--tokenizer` must be a directory, got none." in capsys.readouterr().err
