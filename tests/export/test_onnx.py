"""Test `neobert export onnx`.

Graphs are compared with torch and sentence-transformers, and int8 with its formula. Covers the
files, the third input that some loaders require, and refusals.

The inputs and outputs of loaders come from their code: Bert of Spark NLP, OnnxBertBiEncoder of
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


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = path if isinstance(path, bytes) else str(path)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(path, ids, mask):
    opened = session(path)
    names = [output.name for output in opened.get_outputs()]
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    return dict(zip(names, opened.run(names, inputs)))


@pytest.fixture(scope="module")
def exported(sentence_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "out"
    assert command.main(["onnx", str(sentence_folder), str(folder), "--precisions", *FILES]) == 0
    return folder


# ------------------------------------------------------------------------------------------------
# graphs


@pytest.mark.parametrize("lengths", [(1,), (7,), (3, 1), (9, 4, 30, 2, 17)])
def test_any_batch_and_length(exported, sentence_folder, lengths, padded_batch):
    """Equal to torch at shapes that the tracer never saw: one token, one text, more texts."""
    ids, mask = padded_batch(*lengths)
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
    for name, tolerance in (("fp32", 1e-4), ("fp16", 0.05)):
        hidden = run(exported / "onnx" / FILES[name], ids, mask)["last_hidden_state"]
        assert hidden.dtype == np.float32
        assert (torch.from_numpy(hidden) - expected)[mask.bool()].abs().max() < tolerance, name


def test_the_sentence_embedding_is_that_of_sentence_transformers(exported, sentence_folder):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(sentence_folder), device="cpu")
    texts = ["rain", "the server is down again, and nobody knows why", "42 words " * 60]
    options = {"padding": True, "truncation": True, "max_length": 120, "return_tensors": "pt"}
    inputs = model.tokenizer(texts, **options)
    expected = model.encode(texts)
    assert expected.shape == (3, 48) and np.allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-5)
    for name, least in (("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.99), ("q4", 0.8)):
        path = exported / "onnx" / FILES[name]
        embeddings = run(path, inputs["input_ids"], inputs["attention_mask"])["sentence_embedding"]
        assert (embeddings * expected).sum(1).min() > least, name


def test_names_and_axes(exported):
    """Plain ONNX alone, so that every reader takes it."""
    opened = session(exported / "onnx" / "model.onnx")
    assert [(i.name, i.type, i.shape) for i in opened.get_inputs()] == [
        ("input_ids", "tensor(int64)", ["batch", "length"]),
        ("attention_mask", "tensor(int64)", ["batch", "length"]),
    ]
    assert [(o.name, o.type, o.shape) for o in opened.get_outputs()] == [
        ("last_hidden_state", "tensor(float)", ["batch", "length", 64]),
        ("sentence_embedding", "tensor(float)", ["batch", 48]),
    ]
    opsets = onnx.load(exported / "onnx" / "model.onnx").opset_import
    assert {opset.domain: opset.version for opset in opsets} == {"": 18}


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
    fields = {"num_labels": 3, **fields}
    folder, out = hub_folder(model_class, num_hidden_layers=1, **fields), tmp_path / "out"
    command.main(["onnx", str(folder), str(out), "--precisions", "fp32", "int8"])
    ids, mask = padded_batch(11, 5)
    with torch.no_grad():
        expected = model_class.from_pretrained(folder).eval()(ids, attention_mask=mask)
    results = run(out / "onnx" / "model.onnx", ids, mask)
    assert list(results) == outputs
    for name in outputs:
        real = ... if expected[name].shape[1:] == (3,) else mask.bool()
        assert (torch.from_numpy(results[name]) - expected[name])[real].abs().max() < 1e-4
    config = json.loads((out / "config.json").read_text())
    published = {NeoBERTForMaskedLM: "NeoBERTLMHead", NeoBERTModel: "NeoBERT"}
    assert config["architectures"][0] == published.get(model_class, model_class.__name__)
    assert not (out / "modules.json").exists()


# ------------------------------------------------------------------------------------------------
# int8


def test_a_vector_does_not_depend_on_its_neighbors(exported, padded_batch):
    """One scale a token: beside a text with other values, and in a longer batch, a text keeps its
    vector."""
    path = exported / "onnx" / FILES["int8"]
    ids, mask = padded_batch(9, 4, 30)
    together = run(path, ids, mask)["sentence_embedding"][0]
    alone = run(path, ids[:1, :9], mask[:1, :9])["sentence_embedding"][0]
    assert np.abs(together - alone).max() < 1e-5


def test_int8_by_its_formula():
    """x in steps of its largest value / 127, weights in steps of a column's largest sum of two
    neighbors of the same sign / 127, added up as integers."""
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
    (product,) = session(model.SerializeToString()).run(None, {"x": x})
    pairs = weight.reshape(24, 2, 80)
    sums = np.stack([np.maximum(pairs, 0).sum(1), -np.minimum(pairs, 0).sum(1)])
    token, column = np.abs(x).max(-1, keepdims=True) / 127, sums.max((0, 1)) / 127
    expected = np.rint(x / token) @ np.rint(weight / column) * token * column
    assert np.abs(product - expected).max() / np.abs(expected).max() < 1e-5
    relative = np.linalg.norm(product - x @ weight, axis=-1) / np.linalg.norm(x @ weight, axis=-1)
    assert relative.max() < 0.02, "a token with large values took precision from the others"


def test_integer_sums_stay_within_16_bits(exported):
    """What processors without VNNI would cut off: two products of an unsigned and a signed
    number."""
    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(exported / "onnx" / FILES["int8"]).graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.name.endswith("_weight")
    ]
    assert len(weights) == 2 * 4, "the linear layers of the blocks"
    for weight in weights:
        pairs = weight.astype(int).reshape(len(weight) // 2, 2, -1)
        assert np.maximum(pairs, 0).sum(1).max() * 255 < 2**15
        assert np.minimum(pairs, 0).sum(1).min() * 255 >= -(2**15)
    assert max(int(np.abs(weight.astype(int)).max()) for weight in weights) > 64


def test_int8_of_the_bundled_encoder(tmp_path):
    """A trained model: what the page on serving says of it."""
    arguments = ["onnx", str(ROOT / "examples" / "sentence-encoder"), str(tmp_path / "out")]
    command.main([*arguments, "--precisions", "int8"])
    (agreement,) = json.loads((tmp_path / "out" / "export.json").read_text())["files"].values()
    # Of random tokens, whose largest values are not those of texts.
    assert agreement["pooled"] > 0.998 and agreement["token"] > 0.995


# ------------------------------------------------------------------------------------------------
# folder


def test_the_folder_is_complete(exported):
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
    assert "license" not in card and "base_model" not in card, "the source states none"


@pytest.fixture
def traced(exported, monkeypatch):
    """Tracing is replaced by the graph that was traced before."""
    monkeypatch.setattr(target, "_trace", lambda graph: onnx.load(exported / "onnx" / "model.onnx"))


def test_large_models_keep_their_weights_beside_the_graph(
    sentence_folder, tmp_path, traced, monkeypatch, padded_batch
):
    monkeypatch.setattr(target, "LARGEST_FILE", 1000)
    command.main(["onnx", str(sentence_folder), str(tmp_path / "out")])
    graph = tmp_path / "out" / "onnx" / "model.onnx"
    assert graph.with_suffix(".onnx_data").stat().st_size > 100_000
    assert run(graph, *padded_batch(5, 2))["sentence_embedding"].shape == (2, 48)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transformers.js_config"] == {"use_external_data_format": {"model.onnx": 1}}


def test_a_wrong_graph_is_refused(sentence_folder, exported, tmp_path, monkeypatch):
    """The comparison is real: a graph whose last norm is another one does not pass."""
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
# the third input


TEXTS = ["rain", "the server is down again, and nobody knows why", "42 words about a server"]


@pytest.fixture(scope="module")
def three(sentence_folder, tmp_path_factory):
    """Exported with the third input."""
    out = tmp_path_factory.mktemp("three") / "out"
    options = ["--precisions", *FILES, "--token-type-ids"]
    command.main(["onnx", str(sentence_folder), str(out), *options])
    return out


@pytest.mark.parametrize("file", ["model", "model_fp16", "model_quantized", "model_q4"])
def test_the_third_input_changes_no_bit(exported, three, file):
    """Whatever its numbers, and in every precision."""
    torch.manual_seed(0)
    mask = (torch.arange(17) < torch.tensor([17, 5, 9])[:, None]).long()
    rows = {"input_ids": (torch.randint(5, 60, mask.shape) * mask).numpy()}
    rows["attention_mask"] = mask.numpy()
    plain, with_types = (session(folder / "onnx" / f"{file}.onnx") for folder in (exported, three))
    inputs = with_types.get_inputs()
    assert [i.name for i in inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {(i.type, *i.shape) for i in inputs} == {("tensor(int64)", "batch", "length")}
    outputs = plain.run(None, rows)
    for types in (np.zeros_like(rows["input_ids"]), np.full_like(rows["input_ids"], 7)):
        for a, b in zip(outputs, with_types.run(None, {**rows, "token_type_ids": types})):
            assert a.tobytes() == b.tobytes()


def encode_one(folder, text):
    """ids and mask (1, L), as tokenizer.json says without padding."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    return np.array([encoding.ids], np.int64), np.array([encoding.attention_mask], np.int64)


def spark_nlp(opened, folder):
    """One batch padded with 0; the mask is where ids are not 0; output by name, mean, length 1."""
    rows = [encode_one(folder, text)[0][0] for text in TEXTS]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, token_ids in zip(ids, rows):
        row[: len(token_ids)] = token_ids
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
    names = {node.name for node in (*opened.get_inputs(), *opened.get_outputs())}
    assert {"input_ids", "attention_mask", "token_type_ids", "last_hidden_state"} <= names
    return langchain4j(opened, folder)


@pytest.mark.parametrize("loader", [spark_nlp, langchain4j, semantic_kernel, older_vespa])
def test_loaders_that_always_feed_three(exported, three, sentence_folder, loader):
    """They open the graph with the third input, and fail on the one without. Each pools the hidden
    states by itself: their mean, as torch has it."""
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    vectors = np.asarray(loader(session(three / "onnx" / "model.onnx"), three))
    for text, vector in zip(TEXTS, vectors):
        with torch.no_grad():
            ids = torch.from_numpy(encode_one(three, text)[0])
            expected = model(ids).last_hidden_state[0].mean(0).numpy()
        assert np.abs(vector - expected).max() < 1e-4
    with pytest.raises(Exception, match="token_type_ids|assert"):
        loader(session(exported / "onnx" / "model.onnx"), exported)
