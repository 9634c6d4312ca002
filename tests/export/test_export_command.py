"""Test the parts of `neobert export` that all targets share.

These are the command line, loading the source model, pooling, and the comparison with torch.
"""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForSequenceClassification,
)
from neobert import cli as __main__
from neobert.common.errors import UserError
from neobert.conversion import verify
from neobert.export import check, command, folder
from neobert.export.check import EngineAgreement, Reference
from neobert.export.graph import Graph
from neobert.export.model_card import build_card
from neobert.export.options import ModelOptions
from neobert.export.source import Pooling, open_source


def load_source(path, **options):
    """Return the `SourceModel` of a directory."""
    with open_source(ModelOptions(folder=str(path), output="out", **options)) as source:
        return source


# ------------------------------------------------------------------------------------------------
# Command line


def test_invalid_arguments_are_reported(capsys, tmp_path):
    """Errors in the arguments are reported in one line, and no files are written."""
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


def test_missing_package_is_reported(monkeypatch):
    """The error for a missing package contains the command that installs it."""
    monkeypatch.setitem(
        command.TARGETS, "onnx", command.Target("onnx", "onnx", ("no_such_engine",))
    )
    with pytest.raises(ImportError, match=r"pip install no-such-engine`, or .* '.\[onnx\]'"):
        command.main(["onnx", "model", "out"])


# ------------------------------------------------------------------------------------------------
# Source model


def test_load_sentence_encoder(sentence_folder):
    """Check what is loaded from a directory of sentence-transformers."""
    source = load_source(sentence_folder)

    assert (source.head.option, source.max_length, source.prompts["query"]) == ("base", 120, "a ")
    class_names = [type(module).__name__ for module in source.pooling.modules]
    assert class_names == ["Pooling", "Dense", "Normalize"]
    assert source.pooling.mode == "mean" and source.pooling.normalize

    state = load_file(sentence_folder / "2_Dense" / "model.safetensors")
    (dense,) = source.pooling.dense
    assert torch.equal(dense.linear.weight, state["linear.weight"])
    assert not source.config.unpad_inputs and not source.model.training


def test_prompts_excluded_from_pooling(sentence_folder, tmp_path):
    """Check the export of a model whose pooling excludes the tokens of prompts.

    The inputs of a graph do not mark the end of a prompt, so the graph has no pooled output. The
    pooling configuration of the export states that prompts are excluded.
    """
    source = load_source(sentence_folder)
    excluding = replace(source, pooling=replace(source.pooling, include_prompt=False))
    both_outputs = ["last_hidden_state", "sentence_embedding"]
    assert (
        Graph(source).outputs
        == Graph(replace(excluding, prompts={"query": ""})).outputs
        == both_outputs
    )
    assert Graph(excluding).outputs == both_outputs[:1]

    (tmp_path / "tokenizer").mkdir()
    for exported, include_prompt in ((source, True), (excluding, False)):
        output_folder = tmp_path / str(include_prompt)
        output_folder.mkdir()
        folder._write_common(
            output_folder, replace(exported, tokenizer_folder=tmp_path / "tokenizer")
        )
        pooling = json.loads((output_folder / "1_Pooling" / "config.json").read_text())
        assert pooling["include_prompt"] is include_prompt
        settings = json.loads((output_folder / "config_sentence_transformers.json").read_text())
        assert settings["prompts"]["query"] == "a "


def test_default_prompt_and_similarity_function_are_kept(sentence_folder, tmp_path):
    """The settings of sentence-transformers are kept, also those of a model without prompts."""
    (tmp_path / "tokenizer").mkdir()
    values = {"prompts": {"query": "a "}, "default_prompt_name": "query"}
    cases = (
        values,
        {"similarity_fn_name": "dot"},
        {**values, "similarity_fn_name": "euclidean"},
        {"truncate_dim": 8},
    )
    for number, expected in enumerate(cases):
        model_folder = shutil.copytree(sentence_folder, tmp_path / f"model-{number}")
        (model_folder / "config_sentence_transformers.json").write_text(json.dumps(expected))
        source = load_source(model_folder)

        output_folder = tmp_path / f"export-{number}"
        output_folder.mkdir()
        folder._write_common(
            output_folder, replace(source, tokenizer_folder=tmp_path / "tokenizer")
        )
        content = (output_folder / "config_sentence_transformers.json").read_text()
        assert json.loads(content).items() >= expected.items()


def test_default_prompt_and_truncation_reach_the_user(sentence_folder, tmp_path, caplog):
    """Graphs truncate embeddings, and the user learns which settings other libraries ignore."""
    model_folder = shutil.copytree(sentence_folder, tmp_path / "model")
    settings = {"prompts": {"query": "a "}, "default_prompt_name": "query", "truncate_dim": 8}
    (model_folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    source = load_source(model_folder)

    ids = torch.tensor([[2, 5, 6, 3]])
    mask = torch.ones_like(ids)
    complete = load_source(sentence_folder)
    expected = Graph(complete)(ids, mask)[1]
    assert expected.shape == (1, 48)
    assert torch.equal(Graph(source)(ids, mask)[1], expected[:, :8])

    description = "mean pooling, Dense, normalized, truncated to 8 dimensions, default prompt 'a '"
    assert description in source.describe()
    files = {"model": check.GraphFile("fp32", 1.0, 1.0)}
    card = build_card(source, "name", "onnx", files)
    assert "- Prepend the default prompt 'a ' to each text.\n" in card
    assert "- Truncate embeddings to 8 dimensions.\n" in card
    assert "settings" not in build_card(complete, "name", "onnx", files)


def test_cross_encoders_are_exported_with_their_head(hub_folder, tmp_path):
    """A CrossEncoder has a modules.json with its transformer only."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    path = str(hub_folder(NeoBERTForSequenceClassification, num_labels=1))
    encoder = sentence_transformers.CrossEncoder(path, device="cpu")
    encoder.save_pretrained(str(tmp_path / "reranker"))
    # Not all versions of sentence-transformers write this file.
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.X.Transformer"}]
    (tmp_path / "reranker" / "modules.json").write_text(json.dumps(modules))

    source = load_source(tmp_path / "reranker")
    assert source.head.option == "sequence-classification"
    assert source.pooling is None
    assert torch.equal(source.model.classifier.weight, encoder.model.classifier.weight)


def test_other_heads_need_no_known_modules(hub_folder, tmp_path):
    """With a head that reads no embeddings, modules behind the transformer do not matter."""
    model_folder = shutil.copytree(hub_folder(NeoBERTForMaskedLM), tmp_path / "splade")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Splade", "type": "sentence_transformers.SpladePooling"},
    ]
    (model_folder / "modules.json").write_text(json.dumps(modules))
    assert load_source(model_folder, head="masked-lm").head.option == "masked-lm"
    with pytest.raises(UserError, match="must have the modules Transformer, Pooling"):
        load_source(model_folder)


def test_default_head_matches_the_weights(hub_folder):
    """The default head is that of the weights, and `--head base` loads the encoder only."""
    model_folder = hub_folder(NeoBERTForMaskedLM)
    assert load_source(model_folder).head.option == "masked-lm"

    base = load_source(model_folder, head="base")
    assert base.head.option == "base" and base.pooling is None
    expected = load_file(model_folder / "model.safetensors")[
        "model.transformer_encoder.1.qkv.weight"
    ]
    assert torch.equal(base.model.transformer_encoder[1].qkv.weight, expected)


def test_a_raw_checkpoint_is_converted_first(hub_folder, tmp_path, monkeypatch, capsys):
    """The export of a raw training checkpoint has the weights of the same model as a Hub folder.

    The report of the conversion, whose folder is temporary, is not printed.
    """
    model_folder = hub_folder(NeoBERTForMaskedLM)
    raw = tmp_path / "raw"
    shutil.copytree(model_folder, raw)
    (raw / "model.safetensors").unlink()
    torch.save(load_file(model_folder / "model.safetensors"), raw / "state_dict.pt")
    # The comparison after a conversion has tests of its own.
    monkeypatch.setattr(verify, "verify", lambda folder, conversion, expected, scratch: expected)

    source = load_source(raw)
    assert capsys.readouterr().out == ""
    expected_source = load_source(model_folder)
    assert source.head.option == "masked-lm"
    for actual, expected in zip(source.model.parameters(), expected_source.model.parameters()):
        assert torch.equal(actual, expected)


def test_unsupported_models_are_refused(hub_folder, sentence_folder, tmp_path):
    """Check the error messages for models that cannot be exported.

    These are heads and model types without support, files without some of the tensors, and modules
    of sentence-transformers that are not part of the graphs.
    """
    with pytest.raises(UserError, match="multiple-choice models cannot be exported"):
        load_source(hub_folder(NeoBERTForMultipleChoice))

    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="must be a NeoBERT, got a bert model"):
        load_source(tmp_path / "bert")

    damaged = tmp_path / "damaged"
    shutil.copytree(hub_folder(), damaged)
    (damaged / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(UserError, match="lacks tensors of NeoBERTModel: encoder.weight, "):
        load_source(damaged)

    other = tmp_path / "other"
    shutil.copytree(sentence_folder, other)
    modules = json.loads((other / "modules.json").read_text())
    for class_names, message in (
        ("Transformer, Pooling, LSTM", "last, got Transformer, Pooling, LSTM"),
        ("Transformer, Pooling, Normalize, Dense", "and Normalize last, got"),
    ):
        pairs = zip(modules, class_names.split(", "))
        changed = [
            {**module, "type": f"sentence_transformers.models.{class_name}"}
            for module, class_name in pairs
        ]
        (other / "modules.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message):
            load_source(other)


# ------------------------------------------------------------------------------------------------
# Pooling


def test_pooling_matches_formulas():
    """Each pooling mode equals its formula in numpy, without and with normalization."""
    from sentence_transformers import models

    hidden = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
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

    for mode, embeddings in expected.items():
        embeddings = np.stack(embeddings)
        pooling = Pooling(mode, True, (models.Pooling(3, mode),))
        assert np.allclose(pooling(hidden, mask).numpy(), embeddings, atol=1e-6), mode
        normalized = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
        pooling = Pooling(mode, True, (*pooling.modules, models.Normalize()))
        assert np.allclose(pooling(hidden, mask).numpy(), normalized, atol=1e-6), mode


# ------------------------------------------------------------------------------------------------
# Comparison with torch


@pytest.fixture(scope="module")
def reference(sentence_folder):
    """Return a source model and its `Reference`."""
    source = load_source(sentence_folder)
    return source, Reference(source)


def test_comparison_detects_one_wrong_token(reference):
    """Check that one wrong token or embedding decides the result, and that padding is ignored.

    The engine of the test is torch with one of these errors.
    """
    source, comparison = reference

    def run(ids, mask, error=None):
        with torch.no_grad():
            hidden = source.model(ids, attention_mask=mask).last_hidden_state.clone()
        embeddings = source.pooling(hidden, mask)
        if error == "token":
            hidden[-1, 1] *= -1
        if error == "pooled":
            embeddings[-1] *= -1
        if error == "padding":
            hidden[mask == 0] = float("nan")
            embeddings = source.pooling(hidden.nan_to_num(), mask)
            return {"last_hidden_state": hidden.nan_to_num(1e3), "sentence_embedding": embeddings}
        return {"last_hidden_state": hidden.numpy(), "sentence_embedding": embeddings.numpy()}

    # Values at padding positions are not compared.
    for error in (None, "padding"):
        agreement = comparison.agreement(partial(run, error=error))
        cosines = (agreement.token_cosine, agreement.pooled_cosine)
        assert cosines == pytest.approx((1, 1), abs=1e-6)
    for error in ("token", "pooled"):
        worst = getattr(comparison.agreement(partial(run, error=error)), f"{error}_cosine")
        assert worst == pytest.approx(-1, abs=1e-6)

    with pytest.raises(UserError, match="last_hidden_state must have the shape .*, got nothing"):
        comparison.agreement(lambda ids, mask: {})


def test_nan_cosine_fails_the_comparison():
    """A NaN among the cosines makes the comparison fail. Python's `min` might skip it."""
    worst = check._worst([torch.tensor([0.9, float("nan")]), torch.tensor([0.8])])
    with pytest.raises(
        UserError, match="worst pooled cosine to torch must be at least 0.7, got nan"
    ):
        EngineAgreement(None, worst).check("fp16", 0.9, 0.7)
    assert check._worst([torch.tensor([0.9]), torch.tensor([0.8, 0.95])]) == pytest.approx(0.8)


def test_an_export_needs_a_tokenizer(hub_folder, tmp_path, capsys):
    """Without a tokenizer, an export fails and writes nothing."""
    output = tmp_path / "out"
    command = ["export", "onnx", str(hub_folder()), str(output), "--tokenizer", "none"]
    assert __main__.main(command) == 2 and not output.exists()
    assert "`--tokenizer` must be a directory, got none." in capsys.readouterr().err
