"""Pins `neobert export onnx --token-type-ids` and `--for`: the third input changes no bit; loaders
that always feed three open the graph, each with exactly what it feeds; what is written for Vespa,
OpenSearch, Triton and Weaviate is what these read.

What each feeds and reads was taken from its code: Spark NLP's Bert, langchain4j's
OnnxBertBiEncoder, Semantic Kernel's BertOnnxTextEmbeddingGenerationService, Vespa's
HuggingFaceEmbedder, OpenSearch's ONNXSentenceTransformerTextEmbeddingTranslator, Weaviate's
ONNXVectorizer.
"""

import hashlib
import io
import json
import subprocess
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer

from neobert import NeoBERTForSequenceClassification
from neobert.common.errors import UserError
from neobert.common.pooling import save_for_all_versions
from neobert.export import command
from neobert.export.options import OPTIONS


pytestmark = pytest.mark.slow


pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
TEXTS = ["rain", "the server is down again, and nobody knows why", "42 words about a server"]
ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("fp32", "fp16", "int8", "q4")
ALL_PLACES = ("vespa", "opensearch", "triton", "weaviate")


def make_encoder(folder, hub_folder, mode="mean", dense=False, prompts=None):
    """A folder of sentence-transformers; without Dense, as the places can serve it."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models as modules

    parts = [modules.Transformer(str(hub_folder())), modules.Pooling(64, mode)]
    parts += [modules.Dense(64, 48)] * dense + [modules.Normalize()]
    model = sentence_transformers.SentenceTransformer(
        modules=parts, device="cpu", prompts=prompts or {}
    )
    model.max_seq_length = 120
    folder.mkdir()
    save_for_all_versions(model, folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, hub_folder):
    prompts = {"query": "the <query>: ", "document": "a "}
    folder = tmp_path_factory.mktemp("places") / "my.encoder"
    return make_encoder(folder, hub_folder, prompts=prompts)


@pytest.fixture(scope="module")
def two(encoder, tmp_path_factory):
    """Exported as it is."""
    out = tmp_path_factory.mktemp("two") / "out"
    command.main(["onnx", str(encoder), str(out), "--precisions", *PRECISIONS])
    return out


@pytest.fixture(scope="module")
def three(encoder, tmp_path_factory):
    """Exported with the third input and for all places."""
    out = tmp_path_factory.mktemp("three") / "out"
    given = ["--precisions", *PRECISIONS, "--token-type-ids", "--for", *ALL_PLACES]
    command.main(["onnx", str(encoder), str(out), *given])
    return out


@pytest.fixture(scope="module")
def expected(encoder):
    """Vectors by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(encoder), device="cpu").encode(TEXTS)


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        path if isinstance(path, bytes) else str(path), options, providers=["CPUExecutionProvider"]
    )


def same_direction(vectors, expected):
    vectors = np.asarray(vectors)
    assert vectors.shape == expected.shape
    return (vectors * expected).sum(1) / np.linalg.norm(vectors, axis=1) > 1 - 1e-5


# ------------------------------------------------------------------------------------------------
# the third input


@pytest.mark.parametrize("file", ["model", "model_fp16", "model_quantized", "model_q4"])
def test_the_third_input_changes_no_bit(two, three, file):
    """Whatever its numbers, and in every precision."""
    torch.manual_seed(0)
    mask = (torch.arange(17) < torch.tensor([17, 5, 9])[:, None]).long()
    rows = {"input_ids": (torch.randint(5, 60, mask.shape) * mask).numpy()}
    rows["attention_mask"] = mask.numpy()
    plain, with_types = (session(folder / "onnx" / f"{file}.onnx") for folder in (two, three))
    assert [i.name for i in with_types.get_inputs()] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    assert [(i.type, i.shape) for i in with_types.get_inputs()] == [
        ("tensor(int64)", ["batch", "length"])
    ] * 3
    outputs = plain.run(None, rows)
    for types in (np.zeros_like(rows["input_ids"]), np.full_like(rows["input_ids"], 7)):
        for a, b in zip(outputs, with_types.run(None, {**rows, "token_type_ids": types})):
            assert a.tobytes() == b.tobytes()


def encode_one(folder, text):
    """ids and mask (1, L), as tokenizer.json says without padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    found = tokenizer.encode(text)
    return np.array([found.ids], np.int64), np.array([found.attention_mask], np.int64)


def spark_nlp(opened, folder):
    """One batch padded with 0; the mask is where ids are not 0; output by name, mean, length 1."""
    rows = [encode_one(folder, text)[0][0] for text in TEXTS]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, found in zip(ids, rows):
        row[: len(found)] = found
    mask = (ids != 0).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (hidden,) = opened.run(["last_hidden_state"], feeds)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def langchain4j(opened, folder):
    """One text at a time, all three always, as older versions do; the first output is (1, L, D)."""
    vectors = []
    for text in TEXTS:
        ids, mask = encode_one(folder, text)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        vectors.append(opened.run(None, feeds)[0][0].mean(0))
    return vectors


def semantic_kernel(opened, folder):
    """WordPiece from a vocabulary; the width is the last dimension of the first output, a number in
    the graph; all outputs are asked for and the first is pooled."""
    width = opened.get_outputs()[0].shape[-1]
    assert isinstance(width, int)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer, vectors = BertWordPieceTokenizer(vocabulary), []
    for text in TEXTS:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        feeds = dict(zip(("input_ids", "attention_mask", "token_type_ids"), (ids, ids**0, ids * 0)))
        first = opened.run([output.name for output in opened.get_outputs()], feeds)[0]
        vectors.append(first.reshape(-1, width).mean(0))
    return vectors


def older_vespa(opened, folder):
    """Names from the configuration's defaults, checked against the graph before it is run."""
    assert {"input_ids", "attention_mask", "token_type_ids"} <= {
        i.name for i in opened.get_inputs()
    }
    assert "last_hidden_state" in {o.name for o in opened.get_outputs()}
    return langchain4j(opened, folder)


@pytest.mark.parametrize("loader", [spark_nlp, langchain4j, semantic_kernel, older_vespa])
def test_loaders_that_always_feed_three(two, three, expected, loader):
    """They open the graph with the third input, and fail on the one without."""
    assert same_direction(loader(session(three / "onnx" / "model.onnx"), three), expected).all()
    with pytest.raises(Exception, match="token_type_ids|assert"):
        loader(session(two / "onnx" / "model.onnx"), two)


# ------------------------------------------------------------------------------------------------
# places


def test_vespa(three, expected):
    component = ElementTree.parse(three / "vespa" / "component.xml").getroot()
    assert component.tag == "component" and component.get("type") == "hugging-face-embedder"
    found = {part.tag: part.text for part in component}
    assert component.find("transformer-model").get("path") == "models/model.onnx"
    assert component.find("tokenizer-model").get("path") == "models/tokenizer.json"
    assert found["max-tokens"] == "120" and found["pooling-strategy"] == "mean"
    assert found["normalize"] == "true" and "transformer-token-type-ids" not in found
    opened = session(three / "onnx" / "model.onnx")
    assert found["transformer-output"] in {output.name for output in opened.get_outputs()}
    prompts = component.find("prepend")
    assert [(part.tag, part.text) for part in prompts] == [
        ("query", "the <query>: "),
        ("document", "a "),
    ]


def test_vespa_without_the_third_input(encoder, tmp_path):
    """An empty element says that there is none; the names that remain are the graph's."""
    command.main(["onnx", str(encoder), str(tmp_path / "out"), "--for", "vespa"])
    component = ElementTree.parse(tmp_path / "out" / "vespa" / "component.xml").getroot()
    types = component.find("transformer-token-type-ids")
    assert types is not None and not types.text and not types.attrib
    assert not (tmp_path / "out" / "opensearch").exists()


def test_opensearch(three, expected):
    """The archive has the two files at its top, its digest is in the request, and what the
    translator does with them (inputs by position, the first output, pooled and scaled as the
    request says) gives the vectors."""
    request = json.loads((three / "opensearch" / "register.json").read_text())
    packed = (three / "opensearch" / "model.zip").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == request["model_content_hash_value"]
    assert len(packed) == request["model_content_size_in_bytes"]
    config = request["model_config"]
    assert request["model_format"] == "ONNX" and request["function_name"] == "TEXT_EMBEDDING"
    assert config["framework_type"] == "sentence_transformers"
    assert config["pooling_mode"] == "mean" and config["normalize_result"] is True
    assert config["embedding_dimension"] == 64 and config["model_type"] == "bert"
    assert json.loads(config["all_config"])["hidden_size"] == 64
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.namelist() == ["model.onnx", "tokenizer.json"]
        opened = session(archive.read("model.onnx"))
        tokenizer = Tokenizer.from_buffer(archive.read("tokenizer.json"))
    names, vectors = [i.name for i in opened.get_inputs()], []
    for text in TEXTS:
        found = tokenizer.encode(text)
        rows = [np.array([x], np.int64) for x in (found.ids, found.attention_mask, found.type_ids)]
        hidden = opened.run(None, dict(zip(names, rows)))[0][0]
        mask = rows[1][0][:, None]
        vectors.append((hidden * mask).sum(0) / mask.sum())
    assert same_direction(vectors, expected).all()


PARSE = """
import json, sys
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
read = text_format.Parse(open(sys.argv[1]).read(), ModelConfig())
print(json.dumps(json_format.MessageToDict(read, preserving_proto_field_name=True)))
"""


def test_triton(three):
    """Parsed by Triton's own schema, which refuses a field that it does not know; every name, type
    and shape is the graph's."""
    clients = ROOT / ".cache" / "engines" / "clients"
    if not (clients / ".ready").exists():
        pytest.skip("tritonclient is not installed: make test-clients")
    (model,) = (three / "triton").iterdir()
    command_line = [clients / "bin" / "python", "-c", PARSE, model / "config.pbtxt"]
    config = json.loads(subprocess.run(command_line, capture_output=True, check=True).stdout)
    assert config["name"] == model.name == "my_encoder" and config["backend"] == "onnxruntime"
    assert config["max_batch_size"] == 32 and config["dynamic_batching"] == {}
    opened = session(model / "1" / "model.onnx")
    kinds = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32"}

    def of_graph(tensors):
        return [
            (t.name, kinds[t.type], [str(n) if isinstance(n, int) else "-1" for n in t.shape[1:]])
            for t in tensors
        ]

    def of_config(tensors):
        return [(t["name"], t["data_type"], t["dims"]) for t in tensors]

    assert of_config(config["input"]) == of_graph(opened.get_inputs())
    assert of_config(config["output"]) == of_graph(opened.get_outputs())


def test_weaviate(three, expected):
    """The container's names and switches; its mean and its length give the vectors of int8."""
    assert (three / "onnx_runtime").read_bytes() == b"true"
    assert (three / "trust_remote_code").read_bytes() == b"true"
    assert "COPY . /app/models/model" in (three / "Dockerfile").read_text()
    vectors = langchain4j(session(three / "model_quantized.onnx"), three)
    cosines = (np.array(vectors) * expected).sum(1) / np.linalg.norm(vectors, axis=1)
    assert cosines.min() > 0.99


def test_triton_serves_a_head_too(hub_folder, tmp_path):
    """A classifier has no pooling: Triton gives its logits, the search engines refuse it."""
    folder = hub_folder(NeoBERTForSequenceClassification, num_labels=3, num_hidden_layers=1)
    command.main(["onnx", str(folder), str(tmp_path / "out"), "--for", "triton"])
    text = (tmp_path / "out" / "triton" / "model" / "config.pbtxt").read_text()
    assert 'output { name: "logits" data_type: TYPE_FP32 dims: [ 3 ] }' in text
    assert "token_type_ids" not in text
    for place in ("vespa", "opensearch", "weaviate"):
        with pytest.raises(UserError, match="needs a folder of sentence-transformers"):
            command.main(["onnx", str(folder), str(tmp_path / "no"), "--for", place])
        assert not (tmp_path / "no").exists()


def test_what_a_place_cannot_pool_is_refused(hub_folder, sentence_folder, tmp_path):
    """Before anything is traced or written."""
    last = make_encoder(tmp_path / "last", hub_folder, "lasttoken")
    for folder, place, message in (
        (last, "opensearch", "pools by one of mean, .*cls, but last by lasttoken"),
        (last, "vespa", "pools by one of mean, cls, but last by lasttoken"),
        (sentence_folder, "vespa", "has no Dense layer"),
    ):
        with pytest.raises(UserError, match=message):
            command.main(["onnx", str(folder), str(tmp_path / "no"), "--for", place])
        assert not (tmp_path / "no").exists()


def test_the_option_is_spelled_for():
    shown = OPTIONS["export"]["onnx"].help()
    assert "--for  " in shown and "for_" not in shown
    with pytest.raises(UserError, match="^for must be one of vespa, .* but 'solr' was given"):
        OPTIONS["export"].read(["onnx", "a", "b", "--for", "solr"])
    with pytest.raises(UserError, match="--for needs a value"):
        OPTIONS["export"].read(["onnx", "a", "b", "--for"])
