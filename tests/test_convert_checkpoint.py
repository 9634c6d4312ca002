"""The converter: what it writes loads as a user loads it and gives the source's outputs, from every head and dtype, with and without a
configuration; everything else is refused with one sentence and exit code 2 and leaves nothing behind, also after kill -9; pushing.
"""

import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert import convert_checkpoint as converter
from neobert.common.errors import UserError
from neobert.conversion import hub_folder


ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "convert_checkpoint.py"


@pytest.fixture
def without_proof(monkeypatch):
    """Leaves out the reload in a fresh process, which takes seconds; test_the_command and its neighbours have it."""
    monkeypatch.setattr(converter, "verify", lambda folder, head, expected, config: expected)
    monkeypatch.setattr(converter, "verify_tokenizer", lambda folder, tokenizer: None)


def convert(*arguments):
    return converter.main([str(argument) for argument in arguments])


def save(folder, state, **config):
    """A raw checkpoint with an optional configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), folder / "state_dict.pt")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def model(tiny_config):
    return NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config)).eval()


@pytest.fixture
def checkpoint(tmp_path, model, tiny_config):
    return save(tmp_path / "run", model.state_dict(), **tiny_config)


def run_script(*arguments, **kwargs):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=300, **kwargs)


def _package_path():
    """Where a new interpreter finds the package: the folder of a link or of an installed `neobert`."""
    import neobert

    return [Path(neobert.__file__).parent.parent] if Path(neobert.__file__).parent.name == "neobert" else sys.path


# ------------------------------------------------------------------------------------------------------- the result, proved


def test_the_command(tmp_path, golden, tokenizer_dir):
    """The golden weights as a raw checkpoint, through the script of a bare checkout, in a shell without the package."""
    weights = load_file(golden / "neobert_tiny" / "model.safetensors")
    source = tmp_path / "run" / "model_checkpoints" / "100"
    save(source, {f"module._orig_mod.{name}": value for name, value in weights.items()})
    shutil.copyfile(golden / "neobert_tiny" / "config.json", tmp_path / "run" / "config.json")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = run_script("run", "out/model", "--tokenizer", "none", "--max-shard-size", "300KB", cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr
    output = tmp_path / "out" / "model"
    shards = sorted(output.glob("model-*.safetensors"))
    assert len(shards) == 3 and max(shard.stat().st_size for shard in shards) < 310_000, "not sharded as asked"
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys() and index["metadata"]["total_size"] == 4 * 177_928
    for shard in shards:
        assert hashlib.sha256(shard.read_bytes()).hexdigest() in process.stdout, "the table lacks the digest of a file"
        for name, value in load_file(shard).items():
            assert torch.equal(value, weights[name]), f"{name} changed"
    assert re.search(r"tensors\s+28\nparameters\s+177,928\ndtype\s+float32\nbytes\s+\d", process.stdout), process.stdout
    assert re.search(r"largest difference\s+0.0e\+00 \(largest output [1-9]", process.stdout), "the proof was not made, or is not exact"
    assert 'AutoModelForMaskedLM.from_pretrained("out/model", trust_remote_code=True)' in process.stdout
    assert "writing tensors: 100%" in process.stderr, "no progress bar"

    expected = load_file(golden / "neobert_tiny" / "expected.safetensors")
    reloaded = NeoBERTForMaskedLM.from_pretrained(output).eval()
    with torch.no_grad():
        logits = reloaded(expected["input_ids"], expected["attention_mask"]).logits
    real = expected["attention_mask"].bool()
    assert (logits - expected["logits"])[real].abs().max() < 5e-5, "the converted model does not give the reference outputs"
    assert not list(tmp_path.glob("out/.*")), "something temporary was left"


@pytest.mark.parametrize("head, auto", [("base", "AutoModel"), ("sequence-classification", "AutoModelForSequenceClassification")])
def test_other_heads_in_bfloat16_with_proof(tmp_path, golden, capsys, head, auto):
    """Ablation M0 (learned positions, LayerNorm, GELU): all from the shapes but the number of heads, whose size is not 64 here."""
    folder = golden / "ablation_m0"
    state = load_file(folder / "model.safetensors")
    if head == "base":
        state = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    else:
        body = {name: value for name, value in state.items() if name.startswith("model.")}
        state = body | load_file(folder / "sequence_classification_head.safetensors")
    (tmp_path / "heads.yaml").write_text("num_attention_heads: 4\n")
    source = save(tmp_path / "run", state)
    options = ("--tokenizer", "none", "--dtype", "bfloat16", "--config", tmp_path / "heads.yaml")
    assert convert(source, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    assert "position_embedding_type learned" in printed and "norm_type layer" in printed and "hidden_act gelu" in printed
    assert f"{auto}.from_pretrained" in printed
    rounding = float(re.search(r"with rounding\s+(\S+)", printed).group(1))
    assert 1e-4 < rounding < 1, "bfloat16 should differ from float32 by its rounding"
    assert re.search(r"largest difference\s+0.0e\+00", printed), "the outputs are not those of the rounded weights"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["NeoBERT" if head == "base" else "NeoBERTForSequenceClassification"]
    assert config["dtype"] == "bfloat16" and config["max_position_embeddings"] == 64
    expected = load_file(folder / "expected.safetensors")
    model_class = NeoBERTModel if head == "base" else NeoBERTForSequenceClassification
    model = model_class.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        if head == "base":
            output, wanted = model(expected["unpadded_input_ids"]).last_hidden_state, expected["unpadded_last_hidden_state"]
        else:
            output = model(expected["input_ids"], expected["attention_mask"]).logits
            wanted = expected["sequence_classification_logits"]
    assert (output - wanted).abs().max() < 0.05 * wanted.abs().max(), "not the reference model within bfloat16's rounding"


def test_proof_catches_a_wrong_file(tmp_path, checkpoint, monkeypatch):
    """One weight written wrongly, and a code file that does not import: the folder is not kept."""
    original = converter.write_weights

    def spoiled(folder, shapes, dtype, read, size):
        return original(folder, shapes, dtype, lambda name: read(name) * (1.01 if "1.wo" in name else 1.0), size)

    monkeypatch.setattr(converter, "write_weights", spoiled)
    with pytest.raises(UserError, match="outputs differ from the source's"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")

    def without_code(folder, *rest):
        (folder / "modeling_neobert.py").write_text("import nothing_at_all\n")
        return original(folder, *rest)

    monkeypatch.setattr(converter, "write_weights", without_code)
    with pytest.raises(UserError, match="does not load, so it was not kept: .*nothing_at_all"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "a spoiled folder was left"


def test_hub_folder_for_sentence_transformers(tmp_path, tiny_config, capsys):
    """Bundled tokenizer, model card, mean pooling: SentenceTransformer's vectors are the means over real tokens."""
    model = NeoBERTForMaskedLM(NeoBERTConfig(**{**tiny_config, "vocab_size": 30522})).eval()
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "vocab_size": 30522})
    assert convert(source, tmp_path / "tiny-neobert", "--sentence-transformers") == 0
    output = tmp_path / "tiny-neobert"
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "configuration_neobert.py", "modeling_neobert.py", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"),
        *("modules.json", "1_Pooling", "sentence_bert_config.json", "convert.json"),
    }
    for name in hub_folder.CODE_FILES:
        assert (output / name).read_bytes() == (ROOT / name).read_bytes(), f"{name} is not the code of the checkout"
    config = json.loads((output / "config.json").read_text())
    assert config["auto_map"] == NeoBERTConfig().to_dict()["auto_map"] and len(config["auto_map"]) == 7
    assert config["architectures"] == ["NeoBERTLMHead"] and "max_length" not in config
    card = (output / "README.md").read_text()
    import yaml

    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["license"] == "mit" and metadata["pipeline_tag"] == "sentence-similarity"
    assert metadata["library_name"] == "sentence-transformers" and {"neobert", "custom_code", "fill-mask"} <= set(metadata["tags"])
    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=True)
    assert tokenizer.model_max_length == 128, "longer than the model's context"
    assert "SentenceTransformer(" in capsys.readouterr().out

    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["a cat", "the quick brown fox jumps over the lazy dog"]
    encoder = sentence_transformers.SentenceTransformer(str(output), trust_remote_code=True, device="cpu")
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1)
    assert torch.allclose(torch.tensor(encoder.encode(texts)), expected, atol=1e-5), "not the mean over real tokens"


# ----------------------------------------------------------------------------------------------------- weights, heads, dtypes


def test_same_bytes_as_save_pretrained(tmp_path, checkpoint, model, without_proof):
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    model.save_pretrained(tmp_path / "saved")
    for name in ("model.safetensors", "modeling_neobert.py", "configuration_neobert.py"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes(), f"{name} differs from the library's"
    ours, theirs = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "saved"))
    assert ours == theirs, "config.json differs from what save_pretrained writes"


@pytest.mark.parametrize("dtype, step", [("float32", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11)])
def test_dtypes(tmp_path, checkpoint, model, without_proof, dtype, step):
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--dtype", dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(value.dtype) for value in written.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    for name, value in model.state_dict().items():
        error = (written[name].float() - value).abs().max() / value.abs().max().clamp(min=1e-9)
        assert error <= step, f"{name} is off by more than the rounding of {dtype}"


def test_own_dtype_is_kept_and_mixed_ones_become_float32(tmp_path, model, tiny_config, without_proof):
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    convert(save(tmp_path / "a", state, **tiny_config), tmp_path / "out", "--tokenizer", "none")
    assert load_file(tmp_path / "out" / "model.safetensors")["decoder.weight"].dtype == torch.bfloat16
    state["decoder.bias"] = state["decoder.bias"].float()
    convert(save(tmp_path / "b", state, **tiny_config), tmp_path / "out2", "--tokenizer", "none")
    assert {value.dtype for value in load_file(tmp_path / "out2" / "model.safetensors").values()} == {torch.float32}


def test_base_head_of_a_masked_lm(tmp_path, checkpoint, model, without_proof, capsys):
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--head", "base")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.model.state_dict().keys()
    assert "left out for --head base: decoder.bias, decoder.weight" in capsys.readouterr().out


def test_classifier_and_decoder_need_a_choice(tmp_path, model, tiny_config, without_proof):
    classifier = NeoBERTForSequenceClassification(NeoBERTConfig(**tiny_config, num_labels=5))
    source = save(tmp_path / "run", {**model.state_dict(), **classifier.state_dict()}, **tiny_config)
    with pytest.raises(UserError, match="both a decoder and a classifier: choose --head"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    convert(source, tmp_path / "out", "--tokenizer", "none", "--head", "sequence-classification")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == classifier.state_dict().keys()
    assert NeoBERTConfig.from_pretrained(tmp_path / "out").num_labels == 5, "the labels do not follow from the classifier's rows"


@pytest.mark.parametrize(
    "head,name", ((NeoBERTForTokenClassification, "token classification"), (NeoBERTForQuestionAnswering, "question answering"))
)
def test_heads_that_are_not_converted(tmp_path, tiny_config, head, name, without_proof):
    source = save(tmp_path / "run", head(NeoBERTConfig(**tiny_config)).state_dict(), **tiny_config)
    with pytest.raises(UserError, match=f"head is one of {name}, which is not converted.*--head base"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    convert(source, tmp_path / "out", "--tokenizer", "none", "--head", "base")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("how", ["absent", "shared", "said"])
def test_tied_decoder(tmp_path, model, tiny_config, without_proof, how):
    state = dict(model.state_dict())
    said = {"tie_word_embeddings": True} if how == "said" else {}
    if how == "absent":
        del state["decoder.weight"]
    else:
        state["decoder.weight"] = state["model.encoder.weight"] if how == "shared" else state["model.encoder.weight"].clone()
    convert(save(tmp_path / "run", state, **tiny_config, **said), tmp_path / "out", "--tokenizer", "none")
    assert "decoder.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    tied = NeoBERTForMaskedLM.from_pretrained(tmp_path / "out")
    assert tied.config.tie_word_embeddings and torch.equal(tied.decoder.weight, state["model.encoder.weight"])


def test_tied_decoder_with_proof(tmp_path, model, tiny_config, capsys):
    state = dict(model.state_dict())
    del state["decoder.weight"]
    convert(save(tmp_path / "run", state, **tiny_config), tmp_path / "out", "--tokenizer", "none")
    assert re.search(r"largest difference\s+0.0e\+00", capsys.readouterr().out)


def test_tying_that_is_not_so_is_refused(tmp_path, model, tiny_config, without_proof):
    source = save(tmp_path / "a", model.state_dict(), **tiny_config, tie_word_embeddings=True)
    with pytest.raises(UserError, match="says tie_word_embeddings, but decoder.weight and model.encoder.weight differ"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    state = {name: value for name, value in model.state_dict().items() if name != "decoder.weight"}
    source = save(tmp_path / "b", state, **tiny_config, tie_word_embeddings=False)
    with pytest.raises(UserError, match="missing tensors: decoder.weight"):
        convert(source, tmp_path / "out", "--tokenizer", "none")


# --------------------------------------------------------------------------------------------------------------- architecture


@pytest.mark.parametrize("intermediate_size", [96, 160, 168, 3072])
def test_architecture_from_the_shapes(tmp_path, without_proof, capsys, intermediate_size):
    config = NeoBERTConfig(vocab_size=100, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=intermediate_size)
    model = NeoBERTForMaskedLM(config)
    convert(save(tmp_path / "run", model.state_dict()), tmp_path / "out", "--tokenizer", "none")
    printed = capsys.readouterr().out
    read = NeoBERTConfig.from_pretrained(tmp_path / "out")
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "norm_type", "ffn_inner_size"):
        assert getattr(read, field) == getattr(config, field), f"{field} was not derived rightly"
    assert int(2 * read.intermediate_size / 3) == read.ffn_inner_size, "a size that needs no rounding is the one to choose"
    assert f"intermediate_size {read.intermediate_size}" in printed and "published head size of 64" in printed
    assert "so the default: norm_eps 1e-05, max_position_embeddings 4096" in printed


def test_published_size_is_derived():
    """The 250M model's tensors, section 2 of the published layout."""
    shapes = {"model.encoder.weight": (30522, 768), "model.transformer_encoder.27.ffn.w12.weight": (4096, 768)}
    fields = converter.derived_fields({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert fields["intermediate_size"] == 3072 and fields["num_attention_heads"] == 12 and fields["num_hidden_layers"] == 28


def test_heads_must_be_given_when_64_does_not_divide(tmp_path, without_proof):
    model = NeoBERTModel(NeoBERTConfig(vocab_size=50, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96))
    source = save(tmp_path / "run", model.state_dict())
    with pytest.raises(UserError, match="hidden size 48 is no multiple of 64.*num_attention_heads: N"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    (tmp_path / "heads.json").write_text('{"num_attention_heads": 4}')
    convert(source, tmp_path / "out", "--tokenizer", "none", "--config", tmp_path / "heads.json")
    assert NeoBERTConfig.from_pretrained(tmp_path / "out").num_attention_heads == 4


def test_llama_vocabulary(tmp_path, tokenizer_dir, without_proof):
    """32,064 rows: the bundled tokenizer of 30,522 does not fit; one with 32,003 tokens, rounded up to a multiple of 64, does."""
    model = NeoBERTModel(NeoBERTConfig(vocab_size=32064, hidden_size=64, num_hidden_layers=1, intermediate_size=96, num_attention_heads=1))
    source = save(tmp_path / "run", model.state_dict())
    with pytest.raises(UserError, match="32064 vocabulary rows, but the tokenizer .* has 30522 tokens"):
        convert(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens([f"extra{i}" for i in range(32003 - 30522)])
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "llama").mkdir(exist_ok=True)
        shutil.copyfile(tokenizer_dir / name, tmp_path / "llama" / name)
    tokenizer._tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
    convert(source, tmp_path / "out", "--tokenizer", tmp_path / "llama")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


# ------------------------------------------------------------------------------------------------------------------ refusals


def _broken(state, kind):
    state = {name: value.clone() for name, value in state.items()}
    wo = "model.transformer_encoder.1.wo.weight"
    if kind == "missing":
        del state[wo], state["decoder.bias"]
    elif kind == "missing layer":
        state = {name: value for name, value in state.items() if "encoder.1." not in name}
    elif kind == "unexpected":
        state["model.transformer_encoder.1.wo.bias"] = torch.zeros(64)
    elif kind == "doubled":
        state[f"module.{wo}"] = state[wo]
    elif kind == "shape":
        state[wo] = state[wo][:32]
    elif kind == "nan":
        state[wo][3, 5] = float("nan")
    elif kind == "inf":
        state["decoder.bias"][7] = -float("inf")
    elif kind == "integers":
        state[wo] = state[wo].to(torch.int8)
    elif kind == "large":
        state[wo][0, 0] = 1e5
    elif kind == "no embedding":
        del state["model.encoder.weight"]
    elif kind == "no layers":
        state = {name: value for name, value in state.items() if "transformer_encoder" not in name}
    return state


@pytest.mark.parametrize(
    "kind, message",
    [
        ("missing", r"missing tensors: .*(decoder.bias, .*1\.wo\.weight|1\.wo\.weight, decoder.bias)"),
        ("missing layer", r"missing tensors: model.transformer_encoder.1.attention_norm.weight, .*1\.ffn\.w3"),
        ("unexpected", r"unexpected tensors: model.transformer_encoder.1.wo.bias\."),
        ("doubled", r"twice under different names: .*1\.wo\.weight, module\..*1\.wo\.weight"),
        ("shape", r"wrong shape .*1\.wo\.weight is \(32, 64\) instead of \(64, 64\)"),
        ("nan", r"NaN or infinite: model.transformer_encoder.1.wo.weight\."),
        ("inf", r"NaN or infinite: decoder.bias\."),
        ("integers", r"not floating-point numbers: .*1\.wo\.weight \(torch.int8\)"),
        ("large", r"beyond the range of float16: .*1\.wo\.weight; use --dtype bfloat16"),
        ("no embedding", r"no token embedding"),
        ("no layers", r"no transformer layers"),
    ],
)
def test_refused_tensors(tmp_path, model, tiny_config, kind, message):
    source = save(tmp_path / "run", _broken(model.state_dict(), kind), **tiny_config)
    with pytest.raises(UserError, match=message) as refusal:
        convert(source, tmp_path / "out", "--tokenizer", "none", "--dtype", "float16")
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "a refused checkpoint left something behind"


def test_wrong_configuration_is_refused(tmp_path, model, tiny_config):
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "hidden_size": 128})
    with pytest.raises(UserError, match=r"wrong shape .*model.encoder.weight is \(200, 64\) instead of \(200, 128\)"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "num_hidden_layers": 2})
    with pytest.raises(UserError, match="unexpected tensors: model.transformer_encoder.2"):
        convert(source, tmp_path / "out", "--tokenizer", "none")
    source = save(tmp_path / "run", model.state_dict(), **{**tiny_config, "num_attention_heads": 5})
    with pytest.raises(UserError, match="hidden_size must be a multiple of num_attention_heads"):
        convert(source, tmp_path / "out", "--tokenizer", "none")


def test_missing_head_is_refused(tmp_path, checkpoint):
    with pytest.raises(UserError, match="missing tensors: dense.weight, dense.bias, classifier.weight, classifier.bias|missing tensors"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--head", "sequence-classification")


@pytest.mark.parametrize(
    "rows, fits", [(30522, True), (30528, True), (30592, True), (30720, True), (30521, False), (30523, False), (31000, False)]
)
def test_vocabulary_rows_against_the_tokenizer(tokenizer_dir, rows, fits):
    """Exactly 30,522, or rounded up to a multiple of 8 ... 512."""
    if fits:
        assert converter.find_tokenizer(None, [], rows).name_or_path == str(tokenizer_dir)
    else:
        with pytest.raises(UserError, match=f"{rows} vocabulary rows, but the tokenizer .* has 30522 tokens .*30522, 30528, 30592, 30720"):
            converter.find_tokenizer(None, [], rows)


def test_tokenizer_beside_the_checkpoint(tmp_path, tokenizer_dir):
    shutil.copytree(tokenizer_dir, tmp_path / "run")
    assert converter.find_tokenizer(None, [tmp_path / "run" / "none", tmp_path / "run"], 30522).name_or_path == str(tmp_path / "run")
    assert converter.find_tokenizer("none", [tmp_path / "run"], 7) is None
    (tmp_path / "run" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        converter.find_tokenizer(None, [tmp_path / "run"], 30522)
    with pytest.raises(UserError, match="--tokenizer takes a folder"):
        converter.find_tokenizer(str(tmp_path), [], 30522)


def test_output_that_exists(tmp_path, checkpoint, without_proof):
    (tmp_path / "out").mkdir()
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    with pytest.raises(UserError, match="exists; choose another one, or replace it with --force"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    before = (tmp_path / "out" / "config.json").stat().st_ino
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--force")
    assert (tmp_path / "out" / "config.json").stat().st_ino != before and (tmp_path / "out" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "the replaced folder was left"

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="was not written by neobert convert"):
        convert(checkpoint, tmp_path / "mine", "--tokenizer", "none", "--force")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        convert(checkpoint, tmp_path / "file", "--force")


def _digests(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "checkpoint_name, output",
    [
        ("run", "run"),
        ("run", "."),
        ("run", "run/checkpoint-3"),  # the step that is found inside of the run
        ("run", "to_step"),
        ("to_run", "run/checkpoint-3"),
        ("run/checkpoint-3", "run"),
        ("run/checkpoint-3/model.safetensors", "run/checkpoint-3"),
        ("run", "run/new"),
        ("run", "run/checkpoint-1"),  # another step: a config.json alone is no mark of ours
        ("run", "other"),
    ],
)
def test_force_never_touches_what_it_did_not_write(tmp_path, model, tiny_config, without_proof, checkpoint_name, output):
    for name in ("run/checkpoint-1", "run/checkpoint-3", "other"):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "other" / ".git").mkdir()
    (tmp_path / "other" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (tmp_path / "to_run").symlink_to("run")
    (tmp_path / "to_step").symlink_to("run/checkpoint-3")
    before = _digests(tmp_path)
    with pytest.raises(UserError, match="holds the input|is the input|lies inside the input|was not written by neobert convert"):
        convert(tmp_path / checkpoint_name, tmp_path / output, "--tokenizer", "none", "--force")
    assert _digests(tmp_path) == before


def test_two_conversions_to_one_new_output(tmp_path, checkpoint, monkeypatch, without_proof):
    """The second one finds the first one's output when it comes to its last rename, and says so."""

    def meanwhile(*arguments):
        monkeypatch.setattr(converter, "write_model_card", lambda *arguments: None)
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")

    monkeypatch.setattr(converter, "write_model_card", meanwhile)
    with pytest.raises(UserError, match="written by another process meanwhile"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert (tmp_path / "out" / "convert.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


# ------------------------------------------------------------------------------------------------------- a stranger's tokenizer


@pytest.fixture
def with_vocabulary(tmp_path, tiny_config, tokenizer_dir):
    """A checkpoint of the bundled tokenizer's size, with that tokenizer beside it."""
    fields = {**tiny_config, "vocab_size": 30522}
    folder = save(tmp_path / "run", NeoBERTForMaskedLM(NeoBERTConfig(**fields)).state_dict(), **fields)
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


def test_no_code_or_path_of_a_tokenizer_comes_along(tmp_path, with_vocabulary, tokenizer_dir):
    """auto_map would run OTHER/REPO's code at loading; the proof loads the result without remote code and compares ids."""
    path = with_vocabulary / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["other/repo--file.Class", "other/repo--file.Class"]}, "name_or_path": "/home/me/secret"}
    settings |= {"custom": {"nested": "/home/me"}, "chat_template": "{{ x }}", "model_max_length": None}
    path.write_text(json.dumps(settings))
    (with_vocabulary / "file.py").write_text("raise SystemExit('ran')")
    assert convert(with_vocabulary, tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    expected = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    assert written == {**expected, "model_max_length": 128}, "a foreign key was copied, or one of ours lost"
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        ours, theirs = ((folder / name).read_text() for folder in (tmp_path / "out", tokenizer_dir))
        assert ours == theirs or json.loads(ours) == json.loads(theirs), f"{name} is not what was read"
    assert "home/me" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize("name", ["merges.txt", "vocab.txt", "tokenizer_config.json"])
def test_links_are_not_followed_into_what_is_published(tmp_path, with_vocabulary, without_proof, name):
    (tmp_path / "secret").write_text("{}" if name.endswith("json") else "password")
    (with_vocabulary / name).unlink(missing_ok=True)
    (with_vocabulary / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=f"{name} is a link to .*secret"):
        convert(with_vocabulary, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_in_the_cache_of_the_hub_is_read(tmp_path, tokenizer_dir):
    """Its snapshots are links into the `blobs` of the same repository."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert converter.find_tokenizer(str(snapshot), [], 30522).vocab_size == 30522


def test_proof_catches_another_tokenizer(tmp_path, with_vocabulary, monkeypatch):
    write = converter.write_tokenizer

    def spoiled(folder, tokenizer, max_length):
        write(folder, tokenizer, max_length)
        path = folder / "tokenizer_config.json"
        path.write_text(path.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))

    monkeypatch.setattr(converter, "write_tokenizer", spoiled)
    with pytest.raises(UserError, match="splits text otherwise"):
        convert(with_vocabulary, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_failed_replacement_keeps_the_old_folder(tmp_path, checkpoint, monkeypatch, without_proof):
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(converter, "verify", lambda *args: (_ for _ in ()).throw(UserError("no")))
    with pytest.raises(UserError):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--force", "--dtype", "bfloat16")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_no_space(tmp_path, checkpoint, monkeypatch, without_proof):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(UserError, match=r"no space: 0.01 GB are needed at .* but 0.00 GB are free"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    monkeypatch.undo()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_folder, "write_safetensors", full)
    with pytest.raises(UserError, match="no space left at"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_kill_9(tmp_path, checkpoint, without_proof):
    """Killed in the middle of writing: no output; the next run removes what was left and ends well."""
    code = (
        "import time\n"
        "from neobert import convert_checkpoint as c\n"
        "write = c.write_model_card\n"
        "c.write_model_card = lambda *a: (write(*a), print('written', flush=True), time.sleep(60))\n"
        f"c.main([{str(checkpoint)!r}, {str(tmp_path / 'out')!r}, '--tokenizer', 'none'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _package_path()))}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    while "written" not in process.stdout.readline():
        assert process.poll() is None, "the conversion ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert "out" not in left and any(name.startswith(".out.writing-") for name in left), f"not killed while writing: {left}"
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "what the killed run left is still there"


def test_killed_while_replacing(tmp_path, checkpoint, without_proof):
    """Between the two renames of --force: the old folder comes back first."""
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    (tmp_path / ".out.writing-x").mkdir()
    os.rename(tmp_path / "out", tmp_path / ".out.writing-x" / "old")
    with pytest.raises(UserError, match="exists"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--step", "last"], "a number or latest, but 'last' was given"),
        (["--private"], "go with --push-to-hub"),
        (["--revision", "v2"], "go with --push-to-hub"),
        (["--sentence-transformers", "--tokenizer", "none"], "needs a tokenizer"),
        (["--max-shard-size", "big", "--tokenizer", "none"], "--max-shard-size takes a size as 5GB or 500MB, but 'big' was given"),
        (["--steps", "3"], "unrecognized arguments: --steps"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_bad_options(tmp_path, checkpoint, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        convert(checkpoint, tmp_path / "out", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_exit_code_and_one_sentence(tmp_path, golden):
    """Through the real command line: a truncated file."""
    data = (golden / "neobert_tiny" / "model.safetensors").read_bytes()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(data[:-100])
    process = run_script(tmp_path / "run", tmp_path / "out")
    assert process.returncode == 2
    assert re.fullmatch(r"convert_checkpoint.py: .*model.safetensors cannot be read, it is truncated .*\n", process.stderr), process.stderr


# ---------------------------------------------------------------------------------------------------------------------- push


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers the calls that an upload of small files makes; remembers what was sent."""

    def do_GET(self):
        self._answer({"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})

    def do_POST(self):
        chunked = "chunked" in (self.headers.get("Transfer-Encoding") or "")
        body = self._chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append((self.path, body, self.headers.get("Authorization")))
        base = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            self._answer({"url": f"{base}/me/tiny", "name": "me/tiny", "id": "me/tiny"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]})
        elif "/commit/" in self.path:
            self._answer({"commitUrl": f"{base}/me/tiny/commit/abc", "commitOid": "abc", "success": True})
        else:
            self._answer({})

    def _chunks(self):
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_push_to_a_stand_in_of_the_hub(tmp_path, checkpoint):
    """The real huggingface_hub client in a fresh process, against a local server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.calls = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_test", "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    options = ("--tokenizer", "none", "--push-to-hub", "me/tiny", "--private", "--revision", "v2")
    arguments = [str(argument) for argument in (checkpoint, tmp_path / "out", *options)]
    # The proof has its own tests.
    code = f"from neobert import convert_checkpoint as c\nc.verify = lambda folder, head, expected, config: expected\nc.main({arguments!r})"
    environment["PYTHONPATH"] = os.pathsep.join(map(str, _package_path()))
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    server.shutdown()
    assert process.returncode == 0, process.stderr[-2000:]
    assert "commit/abc" in process.stdout and 'from_pretrained("me/tiny"' in (tmp_path / "out" / "README.md").read_text()
    calls = {path: body for path, body, _ in server.calls}
    created = json.loads(calls["/api/repos/create"])
    assert created["name"] == "tiny" and (created.get("private") is True or created.get("visibility") == "private"), created
    assert "/api/models/me/tiny/branch/v2" in calls, "the branch was not created"
    commit = next(body for path, body in calls.items() if path.startswith("/api/models/me/tiny/commit/v2"))
    sent = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    assert {"config.json", "model.safetensors", "modeling_neobert.py", "configuration_neobert.py", "README.md"} <= sent
    assert all(token == "Bearer hf_test" for _, _, token in server.calls)


def test_push_without_token_or_network(tmp_path, checkpoint, monkeypatch, without_proof):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="needs a token: run 'hf auth login', or set HF_TOKEN"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_test")
    with pytest.raises(UserError, match="the Hub cannot be reached or refuses the token"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "me/tiny")
    with pytest.raises(UserError, match="takes USER/NAME, but 'a/b/c' was given"):
        convert(checkpoint, tmp_path / "out", "--push-to-hub", "a/b/c")
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "something was written before the Hub was checked"


def test_failed_upload_keeps_the_folder(tmp_path, checkpoint, monkeypatch, without_proof):
    import huggingface_hub

    monkeypatch.setattr(converter, "check_push", lambda repo: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("gone")))
    with pytest.raises(UserError, match=r"is written, but uploading it to me/tiny failed \(gone\); later: hf upload me/tiny"):
        convert(checkpoint, tmp_path / "out", "--tokenizer", "none", "--push-to-hub", "me/tiny")
    assert (tmp_path / "out" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------------------------- the writer


def test_streamed_forward_holds_one_module_at_a_time(model):
    """The proof's reference: the outputs of the whole model, with the weights of one module in memory."""
    ids, reads, state = torch.arange(20)[None], [], model.state_dict()
    with torch.device("meta"):
        empty = NeoBERTForMaskedLM(model.config)

    def read(name):
        loaded = [key for key, value in empty.named_parameters() if value.device.type != "meta"]
        assert len({key.rpartition(".")[0] for key in loaded}) <= 1, f"several modules are loaded at once: {loaded}"
        reads.append(name)
        return state[name]

    with torch.no_grad():
        assert torch.equal(hub_folder.streamed_forward(empty, read, {"input_ids": ids}), model(ids).logits)
    assert sorted(reads) == sorted(state), "not every weight was used once"


def test_time_is_not_wasted_on_what_is_refused(tmp_path, checkpoint, without_proof):
    """An existing output is refused before the checkpoint is read."""
    convert(checkpoint, tmp_path / "out", "--tokenizer", "none")
    (checkpoint / "state_dict.pt").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="exists"):
        convert(checkpoint, tmp_path / "out")
