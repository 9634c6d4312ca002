"""Test examples/query_router.py, which combines an encoder of queries and one of documents."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoTokenizer, BertConfig, BertModel

from neobert.common.errors import UserError


ENCODER = ROOT / "examples" / "sentence-encoder"
TEXTS = ["a bird of prey", "an eagle sits on a tree", "a violin"]


def bert_encoder(folder, hidden_size):
    """Write a random BERT sentence encoder with the tokenizer of the bundled encoder."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden_size, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(ENCODER).save_pretrained(folder / "bert")
    transformer = modules.Transformer(str(folder / "bert"))
    encoder = SentenceTransformer(modules=[transformer, modules.Pooling(hidden_size, "mean")])
    encoder.save_pretrained(str(folder / "encoder"))
    return str(folder / "encoder")


@pytest.fixture
def script():
    """Import examples/query_router.py and return its module."""
    path = ROOT / "examples" / "query_router.py"
    spec = importlib.util.spec_from_file_location("query_router", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_router_keeps_the_prompts_of_both_encoders(script, tmp_path):
    """Queries and documents have the prompts of their encoders, or their default prompts."""
    documents = SentenceTransformer(bert_encoder(tmp_path, 384), device="cpu")
    documents.prompts = {"passage": "passage: "}
    documents.default_prompt_name = "passage"
    documents.save_pretrained(str(tmp_path / "documents"))
    queries = SentenceTransformer(str(ENCODER), device="cpu", trust_remote_code=True)
    queries.prompts = {"query": "a question about "}
    queries.save_pretrained(str(tmp_path / "queries"))

    router = script.build_router(str(tmp_path / "queries"), str(tmp_path / "documents"))
    expected = queries.encode_query(TEXTS), documents.encode_document(TEXTS)
    for embeddings, reference in zip(
        (router.encode_query(TEXTS), router.encode_document(TEXTS)), expected
    ):
        np.testing.assert_allclose(embeddings, reference, atol=1e-5)


@pytest.mark.slow
def test_each_route_has_the_embeddings_of_its_encoder(script, tmp_path, capsys):
    """The saved router encodes queries and documents with their own encoders."""
    documents = bert_encoder(tmp_path, 384)
    output = tmp_path / "router"

    script.main(["--document-model", documents, "--output", str(output)])
    assert "mean cosine between both embeddings of a text is" in capsys.readouterr().out

    # A process that has not imported this package loads the code of the directory.
    code = (
        "import sys, numpy as np\n"
        "from sentence_transformers import SentenceTransformer\n"
        "model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device='cpu')\n"
        "rows = [model.encode_query(sys.argv[3:]), model.encode_document(sys.argv[3:])]\n"
        "np.save(sys.argv[2], rows)\n"
    )
    command = [sys.executable, "-c", code, str(output), str(tmp_path / "rows.npy"), *TEXTS]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)

    queries, texts = np.load(tmp_path / "rows.npy")
    for rows, folder in ((queries, str(ENCODER)), (texts, documents)):
        encoder = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
        np.testing.assert_allclose(rows, encoder.encode(TEXTS), atol=1e-5)
    assert np.abs(queries - texts).max() > 0.01


def test_encoders_of_different_dimensions_are_refused(script, tmp_path):
    documents = bert_encoder(tmp_path, 64)
    with pytest.raises(UserError, match="same dimension, got 384 and 64"):
        script.main(["--document-model", documents, "--output", str(tmp_path / "router")])
    assert not (tmp_path / "router").exists()
