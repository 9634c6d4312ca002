"""Test `neobert export onnx`.

The graphs are compared with torch and sentence-transformers, and int8 with its formula. Further
tests check the files of the export, the third input that some loaders require, and errors.

The inputs and outputs of the loaders follow their code: Bert of Spark NLP, OnnxBertBiEncoder of
langchain4j, BertOnnxTextEmbeddingGenerationService of Semantic Kernel, and HuggingFaceEmbedder of
Vespa.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer

from neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert.common.errors import UserError
from neobert.configuration_neobert import AUTO_MAP
from neobert.export import command, onnx_quantize
from neobert.export import onnx as target


pytestmark = pytest.mark.slow


onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
ROOT = Path(__file__).resolve().parents[2]
FILES = {"fp32": "model.onnx", "fp16": "model_fp16.onnx", "int8": "model_quantized.onnx"}
FILES["q4"] = "model_q4.onnx"


def open_session(path):
    """Return an ONNX Runtime session for the path or the bytes of a graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = path if isinstance(path, bytes) else str(path)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(path, ids, mask):
    """Return the outputs of a graph by name."""
    session = open_session(path)
    names = [output.name for output in session.get_outputs()]
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    return dict(zip(names, session.run(names, inputs)))


@pytest.fixture(scope="module")
def exported(sentence_folder, tmp_path_factory):
    """Return the export of the sentence encoder in all precisions."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    assert command.main(["onnx", str(sentence_folder), str(folder), "--precisions", *FILES]) == 0
    return folder


# ------------------------------------------------------------------------------------------------
# Graphs


@pytest.mark.parametrize("lengths", [(1,), (7,), (3, 1), (9, 4, 30, 2, 17)])
def test_dynamic_shapes(exported, sentence_folder, lengths, padded_batch):
    """The outputs equal those of torch for shapes that differ from the traced example.

    Tracing may store a size as a constant, above all a size of 1.
    """
    ids, mask = padded_batch(*lengths)
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state

    for name, tolerance in (("fp32", 1e-4), ("fp16", 0.05)):
        hidden = run(exported / "onnx" / FILES[name], ids, mask)["last_hidden_state"]
        assert hidden.dtype == np.float32
        assert (torch.from_numpy(hidden) - expected)[mask.bool()].abs().max() < tolerance, name


def test_sentence_embedding_matches_sentence_transformers(exported, sentence_folder):
    """The pooled output equals `SentenceTransformer.encode`, also for a truncated text."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(sentence_folder), device="cpu")
    texts = ["rain", "the server is down again, and nobody knows why", "42 words " * 60]
    options = {"padding": True, "truncation": True, "max_length": 120, "return_tensors": "pt"}
    inputs = model.tokenizer(texts, **options)
    expected = model.encode(texts)
    assert expected.shape == (3, 48) and np.allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)

    for name, min_cosine in (("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.99), ("q4", 0.8)):
        path = exported / "onnx" / FILES[name]
        embeddings = run(path, inputs["input_ids"], inputs["attention_mask"])["sentence_embedding"]
        assert (embeddings * expected).sum(1).min() > min_cosine, name


def test_names_and_axes(exported):
    """Check the names, types and axes of inputs and outputs, and the operator set.

    The float32 graph only has operators of standard ONNX, so that every runtime can load it.
    """
    session = open_session(exported / "onnx" / "model.onnx")
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("input_ids", "tensor(int64)", ["batch", "length"]),
        ("attention_mask", "tensor(int64)", ["batch", "length"]),
    ]
    assert [(o.name, o.type, o.shape) for o in session.get_outputs()] == [
        ("last_hidden_state", "tensor(float)", ["batch", "length", 64]),
        ("sentence_embedding", "tensor(float)", ["batch", 48]),
    ]
    opsets = onnx.load(exported / "onnx" / "model.onnx").opset_import
    assert {opset.domain: opset.version for opset in opsets} == {"": 18}


# Configuration of an ablation of the NeoBERT paper.
M0 = {"position_embedding_type": "learned", "norm_type": "layer", "hidden_act": "gelu"}


@pytest.mark.parametrize(
    "model_class, fields, outputs",
    [
        (NeoBERTForMaskedLM, {}, ["logits"]),
        (NeoBERTForSequenceClassification, {"classifier_pooling": "mean"}, ["logits"]),
        (NeoBERTForTokenClassification, {}, ["logits"]),
        (NeoBERTForQuestionAnswering, {}, ["start_logits", "end_logits"]),
        (NeoBERTModel, M0, ["last_hidden_state"]),
    ],
)
def test_heads(hub_folder, tmp_path, model_class, fields, outputs, padded_batch):
    """The outputs of each head equal those of torch, and config.json names its class."""
    fields = {"num_labels": 3, **fields}
    folder = hub_folder(model_class, num_hidden_layers=1, **fields)
    out = tmp_path / "out"
    command.main(["onnx", str(folder), str(out), "--precisions", "fp32", "int8"])
    ids, mask = padded_batch(11, 5)
    with torch.no_grad():
        expected = model_class.from_pretrained(folder).eval()(ids, attention_mask=mask)
    results = run(out / "onnx" / "model.onnx", ids, mask)

    assert list(results) == outputs
    for name in outputs:
        # Outputs per token are compared at non-padding positions.
        compared = ... if expected[name].shape[1:] == (3,) else mask.bool()
        assert (torch.from_numpy(results[name]) - expected[name])[compared].abs().max() < 1e-4

    config = json.loads((out / "config.json").read_text())
    published = {NeoBERTForMaskedLM: "NeoBERTLMHead", NeoBERTModel: "NeoBERT"}
    assert config["architectures"][0] == published.get(model_class, model_class.__name__)
    assert not (out / "modules.json").exists()


# ------------------------------------------------------------------------------------------------
# int8


def test_int8_embedding_does_not_depend_on_the_batch(exported, padded_batch):
    """The int8 embedding of a text does not depend on the other texts or the length of its batch.

    Activations have one scale per token. A scale per batch would violate this.
    """
    path = exported / "onnx" / FILES["int8"]
    ids, mask = padded_batch(9, 4, 30)
    together = run(path, ids, mask)["sentence_embedding"][0]
    alone = run(path, ids[:1, :9], mask[:1, :9])["sentence_embedding"][0]
    assert np.abs(together - alone).max() < 1e-5


def test_int8_product_matches_formula():
    """Check an int8 product against its formula.

    The step of a token is its largest absolute value / 127. The step of a weight column is the
    largest sum of two neighbors with the same sign / 127. The products are added as integers.
    """
    from onnx import helper, numpy_helper

    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 5, 48)).astype(np.float32)
    weight = generator.normal(size=(48, 80)).astype(np.float32)
    x[1, 3] *= 1000

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "one",
        [helper.make_tensor_value_info("x", 1, ["b", "l", 48])],
        [helper.make_tensor_value_info("y", 1, ["b", "l", 80])],
        [numpy_helper.from_array(weight, "w")],
    )
    opset = [helper.make_opsetid("", 18)]
    model = onnx_quantize.int8(helper.make_model(graph, opset_imports=opset, ir_version=10))
    (product,) = open_session(model.SerializeToString()).run(None, {"x": x})

    pairs = weight.reshape(24, 2, 80)
    sums = np.stack([np.maximum(pairs, 0).sum(1), -np.minimum(pairs, 0).sum(1)])
    token_steps = np.abs(x).max(-1, keepdims=True) / 127
    column_steps = sums.max((0, 1)) / 127
    expected = (
        np.rint(x / token_steps) @ np.rint(weight / column_steps) * token_steps * column_steps
    )
    assert np.abs(product - expected).max() / np.abs(expected).max() < 1e-5
    relative = np.linalg.norm(product - x @ weight, axis=-1) / np.linalg.norm(x @ weight, axis=-1)
    assert relative.max() < 0.02, "a token with large values reduced the precision of others"


def test_integer_sums_stay_within_16_bits(exported):
    """Sums of two products of 8-bit integers fit into 16 bits.

    Processors without VNNI add two products of an unsigned input and a signed weight in 16 bits,
    and saturate larger sums.
    """
    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(exported / "onnx" / FILES["int8"]).graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.name.endswith("_weight")
    ]
    assert len(weights) == 2 * 4, "expected 4 linear layers in each of 2 blocks"

    for weight in weights:
        pairs = weight.astype(int).reshape(len(weight) // 2, 2, -1)
        assert np.maximum(pairs, 0).sum(1).max() * 255 < 2**15
        assert np.minimum(pairs, 0).sum(1).min() * 255 >= -(2**15)
    # Limiting every weight to 64 would satisfy the bounds, too, but loses precision.
    assert max(int(np.abs(weight.astype(int)).max()) for weight in weights) > 64


def test_int8_of_the_bundled_encoder(tmp_path):
    """Check the agreement of a trained model with torch."""
    arguments = ["onnx", str(ROOT / "examples" / "sentence-encoder"), str(tmp_path / "out")]
    command.main([*arguments, "--precisions", "int8"])
    (agreement,) = json.loads((tmp_path / "out" / "export.json").read_text())["files"].values()
    # The report contains the lowest cosines of the texts that every export is compared on.
    assert agreement["pooled"] > 0.998 and agreement["token"] > 0.995


# ------------------------------------------------------------------------------------------------
# Export directory


def test_the_folder_is_complete(exported):
    """Check the files of an export, and the fields that other libraries read."""
    paths = {path.relative_to(exported).as_posix() for path in exported.rglob("*")}
    expected = """
        config.json tokenizer.json tokenizer_config.json README.md export.json modules.json
        sentence_bert_config.json 1_Pooling/config.json 2_Dense/config.json
        2_Dense/model.safetensors 3_Normalize/config.json modeling_neobert.py
        attention_neobert.py configuration_neobert.py config_sentence_transformers.json
    """.split()
    assert {*expected, *(f"onnx/{file}" for file in FILES.values())} <= paths

    def read(name):
        return json.loads((exported / name).read_text())

    config = read("config.json")
    assert config["model_type"] == "neobert" and config["architectures"] == ["NeoBERT"]
    assert config["auto_map"] == AUTO_MAP and config["unpad_inputs"] is True
    assert read("config_sentence_transformers.json")["prompts"]["query"] == "a "
    assert read("1_Pooling/config.json")["pooling_mode"] == "mean"

    precisions = {file["precision"] for file in read("export.json")["files"].values()}
    assert precisions == set(FILES)
    sizes = {name: (exported / "onnx" / file).stat().st_size for name, file in FILES.items()}
    assert sizes["fp32"] > sizes["fp16"] > sizes["q4"] and sizes["fp32"] > sizes["int8"]

    card = (exported / "README.md").read_text()
    assert "onnx/model_quantized.onnx" in card
    assert "license" not in card and "base_model" not in card, (
        "the model card has metadata that the source model does not have"
    )


@pytest.fixture
def traced(exported, monkeypatch):
    """Replace tracing, which is slow, by loading the graph that was exported before."""
    monkeypatch.setattr(target, "_trace", lambda graph: onnx.load(exported / "onnx" / "model.onnx"))


def test_large_models_use_external_data(
    sentence_folder, tmp_path, traced, monkeypatch, padded_batch
):
    """Weights above the size limit of protobuf are written to a separate file.

    transformers.js only downloads this file if config.json lists it.
    """
    monkeypatch.setattr(target, "MAX_WEIGHT_BYTES", 1000)
    command.main(["onnx", str(sentence_folder), str(tmp_path / "out")])
    graph = tmp_path / "out" / "onnx" / "model.onnx"
    assert graph.with_suffix(".onnx_data").stat().st_size > 100_000
    assert run(graph, *padded_batch(5, 2))["sentence_embedding"].shape == (2, 48)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformers.js_config"] == {"use_external_data_format": {"model.onnx": 1}}


def test_a_wrong_graph_is_refused(sentence_folder, exported, tmp_path, monkeypatch):
    """A graph with a wrong weight fails the comparison with torch, and no files are written."""
    model = onnx.load(exported / "onnx" / "model.onnx")
    (norm,) = (
        tensor for tensor in model.graph.initializer if tensor.name.endswith("layer_norm.weight")
    )
    norm.CopyFrom(onnx.numpy_helper.from_array(np.ones(64, np.float32), norm.name))

    monkeypatch.setattr(target, "_trace", lambda graph: model)
    with pytest.raises(UserError, match="fp32 in ONNX Runtime: the worst token cosine"):
        command.main(["onnx", str(sentence_folder), str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# Third input, token_type_ids


TEXTS = ["rain", "the server is down again, and nobody knows why", "42 words about a server"]


@pytest.fixture(scope="module")
def three(sentence_folder, tmp_path_factory):
    """Return an export with the third input."""
    out = tmp_path_factory.mktemp("three") / "out"
    options = ["--precisions", *FILES, "--token-type-ids"]
    command.main(["onnx", str(sentence_folder), str(out), *options])
    return out


@pytest.mark.parametrize("file", ["model", "model_fp16", "model_quantized", "model_q4"])
def test_token_type_ids_do_not_change_outputs(exported, three, file):
    """The outputs are bit-identical with any `token_type_ids`, in every precision."""
    torch.manual_seed(0)
    mask = (torch.arange(17) < torch.tensor([17, 5, 9])[:, None]).long()
    feeds = {"input_ids": (torch.randint(5, 60, mask.shape) * mask).numpy()}
    feeds["attention_mask"] = mask.numpy()
    plain, with_types = (
        open_session(folder / "onnx" / f"{file}.onnx") for folder in (exported, three)
    )

    inputs = with_types.get_inputs()
    assert [i.name for i in inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {(i.type, *i.shape) for i in inputs} == {("tensor(int64)", "batch", "length")}

    outputs = plain.run(None, feeds)
    for types in (np.zeros_like(feeds["input_ids"]), np.full_like(feeds["input_ids"], 7)):
        for expected, actual in zip(
            outputs, with_types.run(None, {**feeds, "token_type_ids": types})
        ):
            assert expected.tobytes() == actual.tobytes()


def encode_one(folder, text):
    """Tokenize a text with tokenizer.json without padding, and return ids and mask, (1, L)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    return np.array([encoding.ids], np.int64), np.array([encoding.attention_mask], np.int64)


def spark_nlp(session, folder):
    """Return embeddings as Spark NLP computes them.

    It pads one batch with 0, derives the mask from the ids that are not 0, reads the output by its
    name, and averages the hidden states.
    """
    rows = [encode_one(folder, text)[0][0] for text in TEXTS]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, token_ids in zip(ids, rows):
        row[: len(token_ids)] = token_ids
    mask = (ids != 0).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (hidden,) = session.run(["last_hidden_state"], feeds)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)


def langchain4j(session, folder):
    """Return embeddings as langchain4j computes them.

    It runs one text at a time and averages the first output, (1, L, D). Older versions always pass
    three inputs.
    """
    embeddings = []
    for text in TEXTS:
        ids, mask = encode_one(folder, text)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        embeddings.append(session.run(None, feeds)[0][0].mean(0))
    return embeddings


def semantic_kernel(session, folder):
    """Return embeddings as Semantic Kernel computes them.

    It tokenizes with WordPiece and a vocabulary, requests all outputs, and averages the first one.
    The graph must contain the embedding dimension of this output as a number.
    """
    hidden_size = session.get_outputs()[0].shape[-1]
    assert isinstance(hidden_size, int)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = BertWordPieceTokenizer(vocabulary)
    embeddings = []
    for text in TEXTS:
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        feeds = dict(zip(("input_ids", "attention_mask", "token_type_ids"), (ids, ids**0, ids * 0)))
        hidden = session.run([output.name for output in session.get_outputs()], feeds)[0]
        embeddings.append(hidden.reshape(-1, hidden_size).mean(0))
    return embeddings


def older_vespa(session, folder):
    """Return embeddings as older versions of Vespa compute them.

    They check that the graph has the default names of the configuration before they run it.
    """
    names = {node.name for node in (*session.get_inputs(), *session.get_outputs())}
    assert {"input_ids", "attention_mask", "token_type_ids", "last_hidden_state"} <= names
    return langchain4j(session, folder)


@pytest.mark.parametrize("loader", [spark_nlp, langchain4j, semantic_kernel, older_vespa])
def test_loaders_that_require_token_type_ids(exported, three, sentence_folder, loader):
    """Loaders that always pass three inputs need the export with the third input.

    With it, their mean-pooled embeddings equal those of torch. Without it, they fail.
    """
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    embeddings = np.asarray(loader(open_session(three / "onnx" / "model.onnx"), three))
    for text, embedding in zip(TEXTS, embeddings):
        with torch.no_grad():
            ids = torch.from_numpy(encode_one(three, text)[0])
            expected = model(ids).last_hidden_state[0].mean(0).numpy()
        assert np.abs(embedding - expected).max() < 1e-4

    with pytest.raises(Exception, match="token_type_ids|assert"):
        loader(open_session(exported / "onnx" / "model.onnx"), exported)
