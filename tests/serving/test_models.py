"""Test the models of the server.

Covers token ids of tiktoken, dtypes, the fast forward pass for CPUs, the temperature of fine-tuned
classifiers, and models that cannot be served.
"""

import json
import shutil

import numpy as np
import pytest
import tiktoken
import torch
from helpers.hub_cache import add_to_cache
from helpers.serving import (
    ENCODER,
    embeddings_of,
    save_classifier,
    serving,
    texts_of_all_lengths,
)
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForTokenClassification, NeoBERTModel
from neobert.common.errors import UserError
from neobert.embeddings.cpu_forward import CpuClassifier
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.serving import models
from neobert.serving.app import create_app
from neobert.serving.models import Classifier, public_name
from neobert.serving.options import OPTIONS


@pytest.fixture
def byte_encoding(monkeypatch):
    """Replace the encodings of tiktoken by "bytes", which has one token id per byte.

    tiktoken would have to download the files of its own encodings.
    """
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r".+",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={},
    )

    def get_encoding(name):
        if name != "bytes":
            raise ValueError(f"Unknown encoding {name}.")
        return encoding

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)


def test_token_ids_of_tiktoken_are_decoded(byte_encoding):
    """Token ids of tiktoken, token ids of the model and text give the same embedding."""
    ids = list(b"an eagle")
    with serving("--tiktoken-encoding", "bytes") as client:
        model_ids = AutoTokenizer.from_pretrained(ENCODER)("an eagle")["input_ids"]
        body = {"input": [ids, "an eagle", model_ids]}
        rows = embeddings_of(client.post("/v1/embeddings", json=body))
        response = client.post("/v1/embeddings", json={"input": [[256, 1], ids]})
    assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes()
    assert response.status_code == 400
    assert "text 0 must be of the encoding bytes" in response.json()["error"]["message"]


def test_token_ids_of_tiktoken_for_a_tokenizer_with_one_special_token(byte_encoding, tmp_path):
    """Token ids are decoded if the special tokens of the model do not identify its own ids."""
    folder = shutil.copytree(ENCODER, tmp_path / "encoder")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    template = tokenizer["post_processor"]["single"]
    assert template.pop(0)["SpecialToken"]["id"] == "[CLS]"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    # Another class would write the template again.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    with serving("--tiktoken-encoding", "bytes", model=folder) as client:
        assert client.app.state.serving.encoder.packed_encoder.tokenize([""])[0].tolist() == [102]
        body = {"input": [list(b"an eagle"), "an eagle"]}
        rows = embeddings_of(client.post("/v1/embeddings", json=body))
    assert rows[0].tobytes() == rows[1].tobytes()


def test_decoded_token_ids_have_the_limit_of_texts(byte_encoding, monkeypatch):
    """A text is limited to a number of characters, also if a request contains its token ids."""
    monkeypatch.setattr(models, "MAX_CHARACTERS", 8)
    with serving("--tiktoken-encoding", "bytes") as client:
        assert client.post("/embed", json={"inputs": list(b"an eagle")}).status_code == 200
        response = client.post("/embed", json={"inputs": ["a", list(b"an eagle.")]})
    assert response.status_code == 400
    assert response.json()["error"] == (
        "text 1 must have at most 8 characters, got 9. Shorten the text."
    )


def test_truncated_texts_are_tokenized_once(monkeypatch):
    """The complete length of a text is not computed if long texts are truncated."""
    with serving("--truncate") as client:
        encoder = client.app.state.serving.encoder.packed_encoder
        monkeypatch.setattr(encoder, "_full_lengths", None)
        assert client.post("/embed", json={"inputs": "b " * 400}).status_code == 200


def test_an_unknown_encoding_is_refused(byte_encoding):
    """An encoding that tiktoken cannot load is an error at the start of the server."""
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--tiktoken-encoding", "other"])
    with pytest.raises(UserError, match="tiktoken can load, got 'other': Unknown encoding other"):
        create_app(options)


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_other_dtypes_are_close_to_float32(dtype, reranker, classifier):
    """Embeddings in other dtypes are close to those in float32, and all routes respond."""
    encoder = PackedEncoder(str(ENCODER), "float32", "cpu")
    texts = texts_of_all_lengths(8)
    models = ["--reranker", reranker, "--classifier", classifier]
    with serving("--dtype", dtype, *models) as client:
        assert client.app.state.serving.dtype in ("float32", "float16", "bfloat16")
        rows = client.post("/embed", json={"inputs": texts}).json()
        ranks = client.post("/rerank", json={"query": "a", "texts": ["b", "c"]}).json()
        predictions = client.post("/predict", json={"inputs": "an eagle"}).json()
    assert (np.array(rows) * encoder.encode(texts)).sum(1).min() > 0.995
    assert len(ranks) == 2 and sum(row["score"] for row in predictions) == pytest.approx(1)


def load(folder, kind, dtype=torch.float32):
    """Load a model of the server.

    Args:
        folder: Path of the model.
        kind: "reranker" or "classifier".
        dtype: Dtype of the weights.
    """
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--device", "cpu"])
    return getattr(Classifier, f"load_{kind}")(str(folder), dtype, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("is_fast", [True, False])
def test_logits_do_not_depend_on_the_batch(classifier, dtype, is_fast):
    """Logits of a text do not depend on the other texts of its batch.

    `is_fast` selects the forward pass for CPUs instead of that of the model.
    """
    model = load(classifier, "classifier", dtype)
    assert model._forward is not None
    if not is_fast:
        model._forward = None

    tokens = model.tokenize([(text,) for text in texts_of_all_lengths(40)], truncate=True)
    alone = [model.logits([ids])[0].tobytes() for ids in tokens]
    for size in (2, 7, 16, 40):
        batch = [row for i in range(0, 40, size) for row in model.logits(tokens[i : i + size])]
        assert [row.tobytes() for row in batch] == alone
    assert len(set(alone)) == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_cpu_forward_matches_model_logits(classifier, dtype, pooling, tmp_path):
    """The forward pass for CPUs has the logits of the model, for both types of pooling."""
    folder = shutil.copytree(classifier, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "classifier_pooling": pooling}))

    model = load(folder, "classifier", dtype)
    tokens = model.tokenize([(text,) for text in texts_of_all_lengths(20)], truncate=True)
    fast = model.logits(tokens)
    model._forward = None
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(fast, model.logits(tokens), atol=tolerance, rtol=2e-6)


def test_cpu_forward_is_not_used_with_hooks(classifier):
    """A model with a forward hook does not use the fast forward pass, which would skip the hook."""
    model = load(classifier, "classifier").model
    assert CpuClassifier.from_model(model)
    with model.model.register_forward_hook(lambda *arguments: None):
        assert CpuClassifier.from_model(model) is None
    assert CpuClassifier.from_model(model.model) is None


def write_task(folder):
    """Write a task.json with the temperature 2.5 and the maximum length 16."""
    record = {"task": "classification", "text_columns": ["text"], "labels": ["a", "b", "c"]}
    record |= {"bio": False, "max_length": 16, "temperature": 2.5, "version": "0"}
    (folder / "task.json").write_text(json.dumps(record))


def test_temperature_and_max_length_of_task_json(tmp_path):
    """The server applies the temperature and the maximum length of task.json."""
    folder = tmp_path / "topics"
    save_classifier(folder, 3)
    write_task(folder)
    with serving("--classifier", str(folder)) as client:
        raw = client.post("/predict", json={"inputs": "an eagle", "raw_scores": True}).json()
        rows = client.post("/predict", json={"inputs": "an eagle"}).json()
        long = client.post("/predict", json={"inputs": "b " * 15})

    logits = np.array([row["score"] for row in raw]) / 2.5
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose([row["score"] for row in rows], expected, rtol=1e-5)
    assert long.status_code == 400 and "at most 16 tokens, got 17" in long.json()["error"]


def test_task_json_of_a_hub_model_is_read(tmp_path, monkeypatch):
    """A classifier on the Hub has the temperature and the maximum length of its task.json."""
    save_classifier(tmp_path / "topics", 3)
    write_task(tmp_path / "topics")
    add_to_cache(monkeypatch, tmp_path / "hub", tmp_path / "topics", "user/topics")
    model = load("user/topics", "classifier")
    assert (model.name, model.temperature, model.max_length) == ("user/topics", 2.5, 16)


@pytest.mark.parametrize(("tokenizer_limit", "expected"), [(16, 16), (512, 64)])
def test_reranker_of_a_cross_encoder_without_max_seq_length(
    reranker, tmp_path, monkeypatch, tokenizer_limit, expected
):
    """The limit of the model or the tokenizer applies if CrossEncoder has no `max_seq_length`.

    The model has 64 positions.
    """

    class OlderCrossEncoder(CrossEncoder):
        @property
        def max_seq_length(self):
            raise AttributeError("max_seq_length")

    folder = shutil.copytree(reranker, tmp_path / "reranker")
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=tokenizer_limit)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr("neobert.serving.models.CrossEncoder", OlderCrossEncoder)

    model = load(folder, "reranker")
    assert model.max_length == expected
    (ids,) = model.tokenize([("a bird", "word " * 200)], truncate=True)
    assert len(ids) == expected


def test_models_that_cannot_be_served_are_refused(classifier, tmp_path):
    """Check the messages about models without a suitable head, missing models and damaged files."""
    with pytest.raises(UserError, match="CrossEncoder with one score per pair"):
        load(classifier, "reranker")
    with pytest.raises(UserError, match="must have a trained classification head"):
        load(ENCODER, "classifier")
    with pytest.raises(UserError, match="there is no"):
        load(tmp_path / "missing", "classifier")

    folder = tmp_path / "damaged"
    save_classifier(folder, 2)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for kind in ("reranker", "classifier"):
        with pytest.raises(UserError, match="cannot be loaded"):
            load(folder, kind)


@pytest.mark.parametrize(
    ("model_class", "num_labels", "kind", "message"),
    [
        (NeoBERTModel, 1, "reranker", "lack dense.weight, dense.bias, classifier.w.* and 1 more."),
        (NeoBERTForTokenClassification, 1, "reranker", "lack dense.weight, dense.bias. Save the"),
        (NeoBERTForTokenClassification, 3, "reranker", "cannot be loaded"),
        (NeoBERTForTokenClassification, 3, "classifier", "must have a trained"),
    ],
)
def test_models_without_a_sequence_head_are_refused(
    tmp_path, model_class, num_labels, kind, message
):
    """A model without the head of a sequence classifier would have random scores."""
    folder = save_classifier(tmp_path / "model", num_labels)
    config = NeoBERTConfig.from_pretrained(folder)
    model_class(config).save_pretrained(folder)
    with pytest.raises(UserError, match=message):
        load(folder, kind)


def test_a_token_classifier_of_finetune_is_refused(tmp_path):
    """The error about a token classifier names the command that runs it."""
    folder = save_classifier(tmp_path / "names", 3)
    task = {"task": "tokens", "text_columns": ["tokens"], "labels": ["O", "B-X", "I-X"]}
    task |= {"bio": True, "max_length": 64, "temperature": 1.0, "version": "0"}
    (tmp_path / "names" / "task.json").write_text(json.dumps(task))
    with pytest.raises(UserError, match="which predicts labels of words. Use neobert predict."):
        load(folder, "classifier")


def test_default_prompt_of_a_reranker(reranker, tmp_path):
    """The scores of pairs are those of CrossEncoder, which adds its default prompt."""
    prompts = {"rank": "Rank these documents: "}
    model = CrossEncoder(reranker, device="cpu", prompts=prompts, default_prompt_name="rank")
    model.save_pretrained(str(tmp_path / "reranker"))
    documents = ["an eagle", "a violin"]
    expected = model.predict([("a bird", document) for document in documents])
    without_prompt = model.predict([("a bird", document) for document in documents], prompt="")
    assert np.abs(expected - without_prompt).max() > 1e-3

    with serving("--reranker", str(tmp_path / "reranker")) as client:
        body = {"query": "a bird", "documents": documents}
        results = client.post("/v1/rerank", json=body).json()["results"]
    scores = {result["index"]: result["relevance_score"] for result in results}
    np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-5)


def test_max_length_above_the_limit_of_the_model_is_refused():
    """The server does not silently reduce `--max-length` to the limit of the model."""
    options = OPTIONS["serve"].read(["--model", str(ENCODER), "--max-length", "100000"])
    with pytest.raises(UserError, match="`max_length` must be at most .*, got 100,000. Lower"):
        create_app(options)


def test_regression_in_16_bits_is_refused(tmp_path):
    """A regression is served in float32 and int8, but not in 16 bits."""
    folder = save_classifier(tmp_path / "value", 1, problem_type="regression")
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(UserError, match="must be float32 or int8 for a regression, got"):
            load(folder, "classifier", dtype)
    for dtype in (torch.float32, torch.int8):
        assert load(folder, "classifier", dtype).labels == ["LABEL_0"]


def test_logits_that_are_not_finite_are_an_error(classifier):
    """Infinite or NaN logits raise an error that names the dtype."""
    model = load(classifier, "classifier")
    model.model.classifier.bias.data[1] = float("inf")
    with pytest.raises(UserError, match="must be finite, got infinite or NaN values in float32"):
        model.logits([np.array([101, 102])])


def test_public_names(tmp_path, monkeypatch):
    """The public name is the name of the directory, or the complete name on the Hub."""
    folder = tmp_path / "encoder"
    folder.mkdir()
    assert public_name(f"{folder}/") == "encoder"
    assert public_name("organization/encoder") == "organization/encoder"
    (tmp_path / "current").symlink_to(folder)
    assert public_name(str(tmp_path / "current")) == "current"
    monkeypatch.chdir(folder)
    assert public_name(".") == "encoder"
