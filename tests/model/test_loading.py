"""Test loading and saving.

Covers round trips with the code next to the weights, remote code, folders of the other major
version of transformers, initialization of missing weights, tying, resizing, pickling, device maps
and dtypes.

NEOBERT_EXCHANGE names a directory in which runs with different versions of transformers exchange
models.
"""

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers.reference import FIELDS, LEARNED, assert_same, make_model, random_batch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import neobert
from neobert import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTModel,
    modeling_neobert,
)
from neobert.configuration_neobert import AUTO_MAP


HEADS = {
    name: getattr(neobert, target.rpartition(".")[2])
    for name, target in AUTO_MAP.items()
    if name != "AutoConfig"
}
every_head = pytest.mark.parametrize("head", HEADS)
CODE = {"configuration_neobert.py", "attention_neobert.py", "modeling_neobert.py"}
SAVED = {"config.json", "model.safetensors"} | CODE
DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture
def remote(monkeypatch, tmp_path):
    """Remote code in a cache of its own; what it imports is forgotten afterwards."""
    modules = str(tmp_path / "hf_modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", modules, raising=False)
    path = list(sys.path)

    def take_out():
        names = [name for name in sys.modules if name.startswith("transformers_modules")]
        return {name: sys.modules.pop(name) for name in names}

    kept = take_out()
    yield {"trust_remote_code": True, "dtype": torch.float32}
    sys.path[:] = path
    take_out()
    sys.modules.update(kept)


def files(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


def saved_config(folder):
    return json.loads((folder / "config.json").read_text())


def load(model_class, folder, **options):
    """A model in float32, and the names of tensors that its folder lacks."""
    options |= {"output_loading_info": True, "dtype": torch.float32}
    model, info = model_class.from_pretrained(folder, **options)
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model, set(info["missing_keys"])


def outputs(model):
    ids, mask = random_batch([9, 5])
    if type(model).__name__ == "NeoBERTForMultipleChoice":
        ids, mask = ids[None], mask[None]
    with torch.no_grad():
        return model.eval()(ids, attention_mask=mask)[0]


# ------------------------------------------------------------------------------------------------
# round trips


@every_head
def test_save_load_save_is_byte_equal(head, tmp_path):
    model = make_model(HEADS[head], num_labels=3)
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    assert files(first) == SAVED, "the code must travel with the weights"
    again, missing = load(HEADS[head], first)
    again.save_pretrained(second)
    assert not missing and not any(filecmp.cmpfiles(first, second, SAVED, shallow=False)[1:])
    # Where tensors lie in memory decides the last bit of some kernels.
    assert_same(outputs(again), outputs(model), 1e-6)


@every_head
def test_saved_config(head, tmp_path):
    """Other tools match on the published class names."""
    make_model(HEADS[head], num_labels=3).save_pretrained(tmp_path)
    config = saved_config(tmp_path)
    published = {"AutoModel": ["NeoBERT"]}
    published["AutoModelForMaskedLM"] = ["NeoBERTLMHead", "NeoBERTForMaskedLM"]
    assert config["architectures"] == published.get(head, [HEADS[head].__name__])
    assert config["auto_map"] == AUTO_MAP and config["model_type"] == "neobert"
    root = Path(modeling_neobert.__file__).resolve().parents[1]
    for file in CODE:
        assert (tmp_path / file).read_bytes() == (root / file).read_bytes()


def test_architectures_do_not_grow(tmp_path):
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for _ in range(2):
        NeoBERTConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    names = ["NeoBERTLMHead", "NeoBERTForMaskedLM"]
    assert saved_config(tmp_path)["architectures"] == names


def test_where_a_model_is_saved(tmp_path):
    """A folder whose parents are new; other processes than the first write no code."""
    model = make_model(NeoBERTModel)
    model.save_pretrained(tmp_path / "a" / "new" / "folder")
    assert files(tmp_path / "a" / "new" / "folder") == SAVED
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not set(tmp_path.glob("second/*.py")) and not (tmp_path / "second/config.json").exists()


def test_unknown_tensors_of_a_decoder_are_reported(tmp_path):
    """A class without a decoder leaves it out quietly, a masked LM does not."""
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["decoder.extra"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for model_class, expected in (
        (NeoBERTForMaskedLM, {"decoder.extra"}),
        (NeoBERTForSequenceClassification, set()),
    ):
        info = model_class.from_pretrained(tmp_path, output_loading_info=True)[1]
        assert set(info["unexpected_keys"]) == expected, model_class


def test_saved_tensor_names_are_the_published_ones(golden, tmp_path):
    """In one file or several."""
    NeoBERTForMaskedLM.from_pretrained(golden / "neobert_tiny").save_pretrained(tmp_path)
    published = load_file(golden / "neobert_tiny" / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list(tmp_path.glob("shards/*.safetensors"))) > 1
    assert torch.equal(outputs(load(NeoBERTForMaskedLM, tmp_path / "shards")[0]), outputs(model))


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5000.0}


# ------------------------------------------------------------------------------------------------
# remote code


@every_head
def test_remote_code(head, tmp_path, remote):
    """A folder that we saved loads through the Auto classes with its own code, and saves that code
    again."""
    model = make_model(HEADS[head], num_labels=3)
    first, second = tmp_path / "first", tmp_path / "second"
    model.save_pretrained(first)
    loaded = getattr(transformers, head).from_pretrained(first, **remote)
    assert type(loaded).__name__ == HEADS[head].__name__
    assert_same(outputs(loaded), outputs(model), 1e-6)
    loaded.save_pretrained(second)
    assert files(second) == SAVED and saved_config(first) == saved_config(second)
    others = SAVED - {"config.json"}
    assert not any(filecmp.cmpfiles(first, second, others, shallow=False)[1:])


def strange_type(folder):
    """Renames the model type, so that the installed package cannot answer for the folder: only its
    own code can."""
    config = saved_config(folder) | {"model_type": "neobert-elsewhere"}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "configuration_neobert.py"
    code = path.read_text().replace('"neobert"', '"neobert-elsewhere"')
    path.write_text(code)


def test_the_folders_own_code_runs(tmp_path, remote):
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path / "first")
    strange_type(tmp_path / "first")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "first", **remote)
    assert type(loaded).__module__.startswith("transformers_modules")
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.save_pretrained(tmp_path / "second")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "second", **remote)
    assert torch.equal(outputs(again), outputs(model))
    base = AutoModel.from_pretrained(tmp_path / "second", attn_implementation="eager", **remote)
    assert base.config._attn_implementation == "eager"
    loaded.set_attn_implementation("eager")
    assert torch.equal(outputs(base), outputs(loaded.model))


class Unregistered(NeoBERTForSequenceClassification):
    """A user's subclass."""


def test_a_folder_of_a_subclass_has_its_code(tmp_path, remote):
    make_model(Unregistered).save_pretrained(tmp_path)
    assert files(tmp_path) == SAVED and saved_config(tmp_path)["auto_map"] == AUTO_MAP
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, **remote)
    assert type(loaded).__name__ == "NeoBERTForSequenceClassification"


def test_a_users_remote_class_survives_a_save(tmp_path, remote):
    """As `AutoModel...from_pretrained` does without this package: it takes the class of the folder
    and registers it."""
    make_model(NeoBERTForSequenceClassification).save_pretrained(tmp_path / "first")
    name = "NeoBERTForSequenceClassification"
    code = f"from .modeling_neobert import {name}\n\n\nclass Mine({name}):\n    pass\n"
    (tmp_path / "first" / "mine.py").write_text(code)
    for source, target in (("first", "second"), ("second", "third")):
        get_class_from_dynamic_module("configuration_neobert.NeoBERTConfig", str(tmp_path / source))
        mine = get_class_from_dynamic_module("mine.Mine", str(tmp_path / source))
        mine.register_for_auto_class("AutoModelForSequenceClassification")
        mine.from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
        auto_map = saved_config(tmp_path / target)["auto_map"]
        assert auto_map == {**AUTO_MAP, "AutoModelForSequenceClassification": "mine.Mine"}
        assert {*CODE, "mine.py"} < files(tmp_path / target)


def test_the_auto_classes_know_neobert(tmp_path):
    """No remote code is needed with the package."""
    assert type(AutoConfig.for_model("neobert")) is NeoBERTConfig
    for name, model_class in HEADS.items():
        model = getattr(transformers, name).from_config(NeoBERTConfig(**FIELDS))
        assert type(model) is model_class
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for file in CODE:
        (tmp_path / file).unlink()
    config = saved_config(tmp_path)
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is NeoBERTForMaskedLM


def test_any_file_of_the_model_may_be_imported_first():
    """In another process: it imports transformers, whose Auto classes then want them all."""
    code = "import neobert.attention_neobert, transformers as t; t.AutoConfig.for_model('neobert')"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------
# the other major version


EXCHANGED = {
    "plain": {},
    "learned": LEARNED,
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": YARN,
}


@pytest.mark.parametrize("variant", EXCHANGED)
@pytest.mark.parametrize("written_by", ("4.57.6", "5.23.0"))
def test_configurations_of_both_majors(written_by, variant, tmp_path):
    """tests/data holds config.json files written by either; both mean the same model here, and name
    the files that a saved folder has, whether its code was in two or in three."""
    folder = DATA / f"config-{variant}-{written_by}"
    assert saved_config(folder)["auto_map"] == AUTO_MAP
    config = NeoBERTConfig.from_pretrained(folder)
    expected = NeoBERTConfig(**{**FIELDS, **EXCHANGED[variant]})
    names = {*FIELDS, *EXCHANGED[variant], "rope_theta", "rope_parameters", "norm_eps"}
    for name in names | {"tie_word_embeddings", "pad_token_id", "norm_type"}:
        assert getattr(config, name) == getattr(expected, name)
    model = make_model(NeoBERTForMaskedLM, **EXCHANGED[variant])
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert torch.equal(outputs(load(NeoBERTForMaskedLM, tmp_path)[0]), outputs(model))


@pytest.mark.parametrize("variant", EXCHANGED)
def test_exchange_with_the_other_version(variant, tmp_path, remote):
    """Leaves a folder for the other versions and loads what they left, with the code that they
    saved."""
    exchange = os.environ.get("NEOBERT_EXCHANGE")
    if not exchange:
        pytest.skip("NEOBERT_EXCHANGE is not set: no folder to exchange models in")
    model = make_model(NeoBERTForMaskedLM, seed=3, **EXCHANGED[variant])
    model.save_pretrained(Path(exchange) / f"{variant}-{transformers.__version__}")
    for folder in sorted(Path(exchange).glob(f"{variant}-*")):
        loaded = AutoModelForMaskedLM.from_pretrained(folder, **remote)
        assert_same(outputs(loaded), outputs(model), 1e-6, f"model left in {folder.name}")
        saved = tmp_path / folder.name
        loaded.save_pretrained(saved)
        assert filecmp.cmp(saved / "model.safetensors", folder / "model.safetensors", shallow=False)


# ------------------------------------------------------------------------------------------------
# initialization


def test_initialization_is_the_papers():
    """Uniform within the bounds for body and decoder, normal for heads, ones and zeros for norms
    and biases."""
    fields = {**FIELDS, "hidden_size": 128, "num_labels": 3, "embedding_init_range": 0.05}
    fields |= {"decoder_init_range": 0.03, "classifier_init_range": 0.04}
    model = NeoBERTForSequenceClassification(NeoBERTConfig(**fields))
    lm = NeoBERTForMaskedLM(NeoBERTConfig(**fields))
    for name, p in [*model.named_parameters(), *lm.named_parameters()]:
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif name == "dense.weight":
            assert abs(p.std() - 0.04) < 0.002 and p.abs().max() > 0.1, "not normal(0, 0.04)"
        elif name != "classifier.weight":
            bound = 0.05 if name == "model.encoder.weight" else 0.03
            assert 0.98 * bound < p.abs().max() <= bound, f"{name} is not uniform within {bound}"
            assert abs(p.std() - bound / 3**0.5) < 0.03 * bound and abs(p.mean()) < 0.02 * bound


@pytest.mark.parametrize("head", list(HEADS)[2:])
def test_a_new_head_on_a_loaded_body(head, golden):
    """The head is drawn as the paper says, and no loaded weight is touched."""
    published = load_file(golden / "neobert_tiny" / "model.safetensors")
    model, missing = load(HEADS[head], golden / "neobert_tiny", num_labels=50)
    assert missing and not any(name.startswith("model.") for name in missing)
    state = model.state_dict()
    for name in published:
        if name.startswith("model."):
            assert torch.equal(state[name], published[name])
    for name in missing:
        if name.endswith("bias"):
            assert (state[name] == 0).all(), name
        else:
            assert 0.012 < state[name].std() < 0.028
            # A uniform of this spread would end at 0.035.
            assert state[name].numel() < 1000 or state[name].abs().max() > 0.045


def test_a_head_loads_into_the_base_and_the_base_into_a_head(tmp_path):
    head = make_model(NeoBERTForSequenceClassification, num_labels=3)
    head.save_pretrained(tmp_path / "head")
    base = NeoBERTModel.from_pretrained(tmp_path / "head", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    again, missing = load(NeoBERTForSequenceClassification, tmp_path / "base")
    assert missing == {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"}
    for p, q, r in zip(head.model.parameters(), base.parameters(), again.model.parameters()):
        assert torch.equal(p, q) and torch.equal(p, r)


# ------------------------------------------------------------------------------------------------
# tying, resizing


def test_untied_by_default_and_tied_on_request(tmp_path):
    untied = make_model(NeoBERTForMaskedLM)
    assert untied.decoder.weight is not untied.model.encoder.weight
    tied = make_model(NeoBERTForMaskedLM, tie_word_embeddings=True)
    assert tied.decoder.weight is tied.model.encoder.weight
    tied.save_pretrained(tmp_path)
    assert "decoder.weight" not in load_file(tmp_path / "model.safetensors"), "stored once"
    again, missing = load(NeoBERTForMaskedLM, tmp_path)
    assert again.decoder.weight is again.model.encoder.weight and not missing
    assert torch.equal(outputs(again), outputs(tied))


@pytest.mark.parametrize("size", (150, 260))
@pytest.mark.parametrize("tied", (False, True))
@torch.no_grad()
def test_resize_token_embeddings(tied, size, tmp_path):
    """Old tokens keep their logits; the new vocabulary counts for ids and labels, and is saved."""
    model = make_model(NeoBERTForMaskedLM, tie_word_embeddings=tied)
    ids = random_batch([9, 5], vocab_size=150)[0]
    before, bias = model(ids).logits, model.decoder.bias.clone()
    model.resize_token_embeddings(size)
    kept = min(size, 200)
    assert model.config.vocab_size == size and model.model.encoder.weight.shape == (size, 64)
    assert model.decoder.weight.shape == (size, 64) and model.decoder.bias.shape == (size,)
    assert torch.equal(model.decoder.bias[:kept], bias[:kept])
    assert (model.decoder.weight is model.model.encoder.weight) == tied
    assert_same(model(ids).logits[..., :150], before[..., :150], 1e-6, "logits of the old tokens")
    last = torch.full_like(ids, size - 1)
    assert model(last, labels=last).loss.isfinite()
    for given in ({"labels": last + 1}, {"input_ids": last + 1}):
        with pytest.raises(ValueError, match=f"from 0 to {size - 1}"):
            model(**{"input_ids": last, **given})
    model.save_pretrained(tmp_path)
    assert torch.equal(load(NeoBERTForMaskedLM, tmp_path)[0](ids).logits, model(ids).logits)


# ------------------------------------------------------------------------------------------------
# copies, devices, dtype


@pytest.mark.parametrize("device_map", ("auto", "cpu", {"": "cpu"}))
def test_device_map(device_map, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path)
    again, _ = load(NeoBERTForMaskedLM, tmp_path, device_map=device_map)
    again = again if device_map == "auto" else again.to("cpu")
    assert_same(outputs(again), outputs(model), what="placed model")


def test_disk_offload_by_blocks(tmp_path):
    """Blocks wait on disk and come in one by one."""
    accelerate = pytest.importorskip("accelerate", reason="offloading needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    expected = outputs(model)
    names = ("model.encoder", "model.embedding_dropout", "model.layer_norm", "decoder")
    places = dict.fromkeys([*names, "model.transformer_encoder.0"], "cpu")
    places |= {f"model.transformer_encoder.{layer}": "disk" for layer in (1, 2)}
    placed = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert placed.model.transformer_encoder[1].qkv.weight.device.type == "meta"
    assert torch.equal(outputs(placed), expected)


def test_published_aliases():
    assert neobert.NeoBERT is NeoBERTModel and neobert.NeoBERTLMHead is NeoBERTForMaskedLM
