"""Pins loading and saving: byte-equal round trips with the code beside the weights, remote code,
folders of the other major version, initialisation of what a checkpoint lacks, tying, resizing,
pickling, device maps and dtypes.

NEOBERT_EXCHANGE names a folder in which runs on different transformers versions leave models for
each other.
"""

import copy
import filecmp
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
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

from .reference import FIELDS, LEARNED, assert_same, make_model, random_batch


HEADS = {
    "AutoModel": neobert.NeoBERTModel,
    "AutoModelForMaskedLM": neobert.NeoBERTForMaskedLM,
    "AutoModelForSequenceClassification": neobert.NeoBERTForSequenceClassification,
    "AutoModelForTokenClassification": neobert.NeoBERTForTokenClassification,
    "AutoModelForQuestionAnswering": neobert.NeoBERTForQuestionAnswering,
    "AutoModelForMultipleChoice": neobert.NeoBERTForMultipleChoice,
}
MAJOR = int(transformers.__version__.split(".")[0])
CODE = {"configuration_neobert.py", "attention_neobert.py", "modeling_neobert.py"}
DATA = Path(__file__).parent / "data"


@pytest.fixture
def remote(monkeypatch, tmp_path):
    """Remote code in a cache of its own; what it imports is forgotten afterwards."""
    modules = str(tmp_path / "hf_modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", modules, raising=False)
    before = set(sys.modules)
    path = list(sys.path)
    kept = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.startswith("transformers_modules")
    }
    yield {"trust_remote_code": True, "dtype": torch.float32}
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]
    sys.modules.update(kept)


def files(folder):
    return {path.name for path in folder.iterdir() if path.is_file()}


def outputs(model):
    ids, mask = random_batch([9, 5])
    if (
        isinstance(model, neobert.NeoBERTForMultipleChoice)
        or type(model).__name__ == "NeoBERTForMultipleChoice"
    ):
        ids, mask = ids[None], mask[None]
    with torch.no_grad():
        return model.eval()(ids, attention_mask=mask)[0]


# ------------------------------------------------------------------------------------------------
# round trips


@pytest.mark.parametrize("head", HEADS)
def test_save_load_save_is_byte_equal(head, tmp_path):
    model = make_model(HEADS[head], num_labels=3)
    model.save_pretrained(tmp_path / "first")
    assert files(tmp_path / "first") == {"config.json", "model.safetensors"} | CODE, (
        "The code must travel with the weights."
    )
    again, info = HEADS[head].from_pretrained(
        tmp_path / "first", output_loading_info=True, dtype=torch.float32
    )
    assert (
        not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ), info
    again.save_pretrained(tmp_path / "second")
    match, mismatch, errors = filecmp.cmpfiles(
        tmp_path / "first", tmp_path / "second", files(tmp_path / "first"), shallow=False
    )
    assert not mismatch and not errors
    # Where tensors lie in memory decides the last bit of some kernels.
    assert_same(outputs(again), outputs(model), 1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_saved_config(head, tmp_path):
    make_model(HEADS[head], num_labels=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    published = {
        "AutoModel": ["NeoBERT"],
        "AutoModelForMaskedLM": ["NeoBERTLMHead", "NeoBERTForMaskedLM"],
    }
    assert config["architectures"] == published.get(head, [HEADS[head].__name__]), (
        "Other tools match on the published class names."
    )
    assert config["auto_map"] == AUTO_MAP and config["model_type"] == "neobert"
    assert not {
        "max_length",
        "kwargs",
        "trust_remote_code",
        "pretrained_model_name_or_path",
        "dim_head",
    } & set(config)
    for file in CODE:
        source = Path(modeling_neobert.__file__).resolve().parent / file
        assert (tmp_path / file).read_bytes() == source.read_bytes(), f"{file} changed on the way."


def test_architectures_do_not_grow(tmp_path):
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for _ in range(2):
        config = NeoBERTConfig.from_pretrained(tmp_path)
        config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "NeoBERTLMHead",
        "NeoBERTForMaskedLM",
    ]


def test_where_a_model_is_saved(tmp_path):
    """A folder whose parents are new; other processes than the first write no code."""
    model = make_model(NeoBERTModel)
    model.save_pretrained(tmp_path / "a" / "new" / "folder")
    assert files(tmp_path / "a" / "new" / "folder") == {"config.json", "model.safetensors"} | CODE
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second").is_dir() or not files(tmp_path / "second") & (
        CODE | {"config.json"}
    )


def test_folders_of_the_code_before_name_what_there_is():
    """Saved folders have their own two files, or this package's three: both by the same names."""
    for folder in DATA.glob("config-*"):
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP, folder.name


def test_unknown_tensors_of_a_decoder_are_reported(tmp_path):
    """A class without a decoder leaves it out quietly, a masked LM does not."""
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "decoder.extra": torch.zeros(2)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    for model_class, expected in (
        (NeoBERTForMaskedLM, {"decoder.extra"}),
        (NeoBERTForSequenceClassification, set()),
    ):
        info = model_class.from_pretrained(tmp_path, output_loading_info=True)[1]
        assert set(info["unexpected_keys"]) == expected, model_class


def test_saved_tensor_names_are_the_published_ones(golden, tmp_path):
    model = NeoBERTForMaskedLM.from_pretrained(golden / "neobert_tiny")
    model.save_pretrained(tmp_path)
    published, saved = (
        load_file(golden / "neobert_tiny" / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert set(saved) == set(published)
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_sharded_round_trip(tmp_path):
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists() and len(
        list(tmp_path.glob("*.safetensors"))
    ) > 1
    assert torch.equal(
        outputs(NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)), outputs(model)
    )


@pytest.mark.parametrize("variant", ("learned", "yarn", "settings"))
def test_variants_round_trip(variant, tmp_path):
    fields = {
        "learned": LEARNED,
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 5000.0},
        "settings": {
            "unpad_inputs": False,
            "sparse_prediction": True,
            "classifier_pooling": "mean",
            "hidden_dropout": 0.2,
            "norm_eps": 1e-6,
        },
    }[variant]
    model = make_model(NeoBERTForMaskedLM, **fields)
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name in fields:
        assert getattr(again.config, name) == getattr(model.config, name), name
    assert torch.equal(outputs(again), outputs(model))


# ------------------------------------------------------------------------------------------------
# remote code


@pytest.mark.parametrize("head", HEADS)
def test_remote_code(head, tmp_path, remote):
    """A folder that we saved loads through the Auto classes with its own code, and saves that code
    again."""
    model = make_model(HEADS[head], num_labels=3)
    model.save_pretrained(tmp_path / "first")
    # Without this, the installed classes would be preferred to the folder's.
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    auto_class = getattr(transformers, head)
    loaded = auto_class.from_pretrained(tmp_path / "first", **remote)
    assert type(loaded).__name__ == HEADS[head].__name__
    assert_same(outputs(loaded), outputs(model), 1e-6)
    loaded.save_pretrained(tmp_path / "second")
    assert files(tmp_path / "second") == {"config.json", "model.safetensors"} | CODE
    assert json.loads((tmp_path / "second" / "config.json").read_text()) == config
    for file in ("model.safetensors", *CODE):
        assert filecmp.cmp(tmp_path / "first" / file, tmp_path / "second" / file, shallow=False)


def strange_type(folder):
    """Renames the model type, so that the installed package cannot answer for the folder: only its
    own code can."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "neobert-elsewhere"
    (folder / "config.json").write_text(json.dumps(config))
    source = (folder / "configuration_neobert.py").read_text()
    (folder / "configuration_neobert.py").write_text(
        source.replace('model_type = "neobert"', 'model_type = "neobert-elsewhere"')
    )


def test_the_folders_own_code_runs(tmp_path, remote):
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path / "first")
    strange_type(tmp_path / "first")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "first", **remote)
    assert type(loaded).__module__.startswith("transformers_modules"), type(loaded).__module__
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.save_pretrained(tmp_path / "second")
    assert CODE <= files(tmp_path / "second")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "second", **remote)
    assert torch.equal(outputs(again), outputs(model))
    base = AutoModel.from_pretrained(tmp_path / "second", attn_implementation="eager", **remote)
    assert base.config._attn_implementation == "eager"
    assert torch.equal(
        base(random_batch([9])[0])[0],
        loaded.set_attn_implementation("eager") or loaded.model(random_batch([9])[0])[0],
    )


def test_a_fine_tuned_remote_head_travels(tmp_path, remote):
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path / "base")
    strange_type(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=4, **remote
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, mask = random_batch([9, 5])
    model.train()(ids, attention_mask=mask, labels=torch.tensor([1, 3])).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "tuned")
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (
        config["architectures"] == ["NeoBERTForSequenceClassification"]
        and config["auto_map"] == AUTO_MAP
    )
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned", **remote)
    assert again.num_labels == 4 and torch.equal(outputs(again), outputs(model))


class Unregistered(NeoBERTForSequenceClassification):
    """A user's subclass."""


def test_a_folder_of_a_subclass_has_its_code(tmp_path, remote):
    make_model(Unregistered).save_pretrained(tmp_path)
    assert {*CODE, "config.json", "model.safetensors"} == {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert (
        type(AutoModelForSequenceClassification.from_pretrained(tmp_path, **remote)).__name__
        == "NeoBERTForSequenceClassification"
    )


def test_a_users_remote_class_survives_a_save(tmp_path, remote):
    """As `AutoModel...from_pretrained` does without this package: it takes the class of the folder
    and registers it."""
    make_model(NeoBERTForSequenceClassification).save_pretrained(tmp_path / "first")
    code = (
        "from .modeling_neobert import NeoBERTForSequenceClassification\n\n\nclass "
        "Mine(NeoBERTForSequenceClassification):\n    pass\n"
    )
    (tmp_path / "first" / "mine.py").write_text(code)
    for source, target in (("first", "second"), ("second", "third")):
        get_class_from_dynamic_module("configuration_neobert.NeoBERTConfig", str(tmp_path / source))
        mine = get_class_from_dynamic_module("mine.Mine", str(tmp_path / source))
        mine.register_for_auto_class("AutoModelForSequenceClassification")
        mine.from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
        auto_map = json.loads((tmp_path / target / "config.json").read_text())["auto_map"]
        assert auto_map == {**AUTO_MAP, "AutoModelForSequenceClassification": "mine.Mine"}
        assert {*CODE, "mine.py"} < {path.name for path in (tmp_path / target).iterdir()}


def test_the_auto_classes_know_neobert(tmp_path):
    assert type(AutoConfig.for_model("neobert")) is NeoBERTConfig
    for name, model_class in HEADS.items():
        model = getattr(transformers, name).from_config(NeoBERTConfig(**FIELDS))
        assert type(model) is model_class, f"{name} made {type(model)}."
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for file in CODE:
        (tmp_path / file).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is NeoBERTForMaskedLM, (
        "No remote code is needed with the package."
    )


def test_any_file_of_the_model_may_be_imported_first():
    """In another process: it imports transformers, whose Auto classes then want them all."""
    code = "import neobert.attention_neobert, transformers as t; t.AutoConfig.for_model('neobert')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_checkout_is_a_configuration():
    config = NeoBERTConfig.from_pretrained(Path(modeling_neobert.__file__).resolve().parent)
    assert (
        config.hidden_size,
        config.num_hidden_layers,
        config.vocab_size,
        config.max_position_embeddings,
    ) == (768, 28, 30522, 4096)
    assert config.auto_map == AUTO_MAP


# ------------------------------------------------------------------------------------------------
# the other major version


def seeded(fields):
    return make_model(NeoBERTForMaskedLM, seed=3, **fields)


EXCHANGED = {
    "plain": {},
    "learned": LEARNED,
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5000.0},
}


@pytest.mark.parametrize("variant", EXCHANGED)
@pytest.mark.parametrize("written_by", ("4.57.6", "5.23.0"))
def test_configurations_of_both_majors(written_by, variant, tmp_path):
    """tests/data holds config.json files written by either; both mean the same model here."""
    folder = DATA / f"config-{variant}-{written_by}"
    config = NeoBERTConfig.from_pretrained(folder)
    expected = NeoBERTConfig(**{**FIELDS, **EXCHANGED[variant]})
    for name in (
        *FIELDS,
        *EXCHANGED[variant],
        "rope_theta",
        "rope_parameters",
        "norm_eps",
        "tie_word_embeddings",
        "pad_token_id",
        "norm_type",
    ):
        assert getattr(config, name) == getattr(expected, name)
    model = seeded(EXCHANGED[variant])
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(outputs(again), outputs(model)), (
        f"The model that {written_by} describes answers differently."
    )


@pytest.mark.parametrize("variant", EXCHANGED)
def test_exchange_with_the_other_version(variant, tmp_path, remote):
    """Leaves a folder for the other versions and loads what they left, with the code that they
    saved."""
    exchange = os.environ.get("NEOBERT_EXCHANGE")
    if not exchange:
        pytest.skip("NEOBERT_EXCHANGE is not set: no folder to exchange models in")
    mine = Path(exchange) / f"{variant}-{transformers.__version__}"
    seeded(EXCHANGED[variant]).save_pretrained(mine)
    for folder in sorted(Path(exchange).glob(f"{variant}-*")):
        loaded = AutoModelForMaskedLM.from_pretrained(folder, **remote)
        assert_same(
            outputs(loaded),
            outputs(seeded(EXCHANGED[variant])),
            1e-6,
            f"model left in {folder.name}",
        )
        loaded.save_pretrained(tmp_path / folder.name)
        saved = tmp_path / folder.name / "model.safetensors"
        assert saved.read_bytes() == (folder / "model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------
# initialisation


def test_initialisation_is_the_papers():
    """Uniform within the bounds for body and decoder, normal for heads, ones and zeros for norms
    and biases."""
    fields = {
        **FIELDS,
        "hidden_size": 128,
        "embedding_init_range": 0.05,
        "decoder_init_range": 0.03,
        "classifier_init_range": 0.04,
    }
    model = NeoBERTForSequenceClassification(NeoBERTConfig(**fields, num_labels=3))
    lm = NeoBERTForMaskedLM(NeoBERTConfig(**fields))
    for name, p in [*model.named_parameters(), *lm.named_parameters()]:
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif name.startswith(("dense", "classifier")):
            if p.numel() > 1000:
                assert abs(p.std().item() - 0.04) < 0.002 and p.abs().max() > 0.1, (
                    f"{name} is not normal(0, 0.04)."
                )
        else:
            bound = 0.05 if name == "model.encoder.weight" else 0.03
            assert p.abs().max() <= bound and p.abs().max() > 0.98 * bound, (
                f"{name} is not uniform within {bound}."
            )
            assert abs(p.std().item() - bound / 3**0.5) < 0.03 * bound, (
                f"{name} has the wrong spread for a uniform distribution."
            )
            assert abs(p.mean().item()) < 0.02 * bound


@pytest.mark.parametrize(
    "head", [name for name in HEADS if name not in ("AutoModel", "AutoModelForMaskedLM")]
)
def test_a_new_head_on_a_loaded_body(head, golden, tmp_path):
    """The head is drawn as the paper says, and no loaded weight is touched."""
    published = load_file(golden / "neobert_tiny" / "model.safetensors")
    model, info = HEADS[head].from_pretrained(
        golden / "neobert_tiny", num_labels=50, output_loading_info=True, dtype=torch.float32
    )
    assert not info["unexpected_keys"]
    assert info["missing_keys"] and not any(
        name.startswith("model.") for name in info["missing_keys"]
    )
    state = model.state_dict()
    for name in published:
        if name.startswith("model."):
            assert torch.equal(state[name], published[name])
    for name in info["missing_keys"]:
        if name.endswith("bias"):
            assert (state[name] == 0).all(), name
        else:
            assert torch.isfinite(state[name]).all() and 0.012 < state[name].std() < 0.028
            # A uniform of this spread would end at 0.035.
            assert state[name].numel() < 1000 or state[name].abs().max() > 0.045


def test_a_head_loads_into_the_base_and_the_base_into_a_head(tmp_path):
    head = make_model(NeoBERTForSequenceClassification, num_labels=3)
    head.save_pretrained(tmp_path / "head")
    base = NeoBERTModel.from_pretrained(tmp_path / "head", dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(base.parameters(), head.model.parameters()))
    base.save_pretrained(tmp_path / "base")
    again, info = NeoBERTForSequenceClassification.from_pretrained(
        tmp_path / "base", output_loading_info=True, dtype=torch.float32
    )
    assert set(info["missing_keys"]) == {
        "dense.weight",
        "dense.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert all(torch.equal(p, q) for p, q in zip(again.model.parameters(), head.model.parameters()))


def test_a_missing_body_tensor_is_reported(golden, tmp_path):
    tensors = load_file(golden / "neobert_tiny" / "model.safetensors")
    del tensors["model.transformer_encoder.1.wo.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((golden / "neobert_tiny" / "config.json").read_text())
    _, info = NeoBERTForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"model.transformer_encoder.1.wo.weight"}


# ------------------------------------------------------------------------------------------------
# tying, resizing


def test_untied_by_default_and_tied_on_request(tmp_path):
    untied = make_model(NeoBERTForMaskedLM)
    assert untied.decoder.weight is not untied.model.encoder.weight
    assert not torch.equal(untied.decoder.weight, untied.model.encoder.weight)
    tied = make_model(NeoBERTForMaskedLM, tie_word_embeddings=True)
    assert tied.decoder.weight is tied.model.encoder.weight
    tied.save_pretrained(tmp_path)
    assert "decoder.weight" not in load_file(tmp_path / "model.safetensors"), (
        "A shared weight is stored once."
    )
    again, info = NeoBERTForMaskedLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert again.decoder.weight is again.model.encoder.weight and not info["missing_keys"]
    assert torch.equal(outputs(again), outputs(tied))


@pytest.mark.parametrize("size", (150, 260))
@pytest.mark.parametrize("tied", (False, True))
def test_resize_token_embeddings(tied, size, tmp_path):
    model = make_model(NeoBERTForMaskedLM, tie_word_embeddings=tied)
    ids = random_batch([9, 5], vocab_size=150)[0]
    with torch.no_grad():
        before = model(ids).logits
    weight, bias = model.decoder.weight.detach().clone(), model.decoder.bias.detach().clone()
    model.resize_token_embeddings(size)
    kept = min(size, 200)
    assert model.config.vocab_size == size and model.get_input_embeddings().weight.shape == (
        size,
        64,
    )
    assert model.decoder.weight.shape == (size, 64) and model.decoder.bias.shape == (size,)
    assert torch.equal(model.decoder.weight[:kept], weight[:kept]) and torch.equal(
        model.decoder.bias[:kept], bias[:kept]
    )
    assert (model.decoder.weight is model.model.encoder.weight) == tied
    with torch.no_grad():
        assert_same(
            model(ids).logits[..., :150], before[..., :150], 1e-6, "logits of the old tokens"
        )
    last = torch.full_like(ids, size - 1)
    model(last, labels=last).loss.backward()
    with pytest.raises(ValueError, match=f"labels must lie between 0 and {size - 1}"):
        model(last, labels=last + 1)
    with pytest.raises(ValueError, match=f"between 0 and {size - 1}"):
        model(torch.full_like(ids, size))
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


# ------------------------------------------------------------------------------------------------
# copies, devices, dtype


def test_pickle_and_deepcopy():
    model = make_model(NeoBERTForMaskedLM, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(outputs(copied), outputs(model))
        assert copied.config == model.config and copied.config is not model.config
    config = model.config
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
        assert copied == config and copied.rope_parameters == config.rope_parameters


def test_set_attn_implementation(tmp_path):
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for implementation in ("eager", "sdpa"):
        again = NeoBERTForMaskedLM.from_pretrained(tmp_path, attn_implementation=implementation)
        assert again.config._attn_implementation == implementation
    assert NeoBERTForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    with pytest.raises((ValueError, ImportError)):
        NeoBERTForMaskedLM.from_pretrained(tmp_path, attn_implementation="no_such_attention")


@pytest.mark.parametrize("device_map", ("auto", "cpu", {"": "cpu"}))
def test_device_map(device_map, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, device_map=device_map, dtype=torch.float32)
    assert again.device.type == "cpu" or torch.cuda.is_available()
    assert_same(
        outputs(again.to("cpu") if device_map != "auto" else again),
        outputs(model),
        1e-5,
        "placed model",
    )


def test_disk_offload_by_blocks(tmp_path):
    """Half of the blocks wait on disk and come in one by one: `_no_split_modules` names the
    block."""
    accelerate = pytest.importorskip("accelerate", reason="offloading needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    expected = outputs(model)
    placed = accelerate.dispatch_model(
        model,
        {
            "model.encoder": "cpu",
            "model.embedding_dropout": "cpu",
            "model.transformer_encoder.0": "cpu",
            "model.transformer_encoder.1": "disk",
            "model.transformer_encoder.2": "disk",
            "model.layer_norm": "cpu",
            "decoder": "cpu",
        },
        main_device="cpu",
        offload_dir=tmp_path,
    )
    assert placed.model.transformer_encoder[1].qkv.weight.device.type == "meta", (
        "Nothing was offloaded, so this test would be vacuous."
    )
    assert torch.equal(outputs(placed), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_dtype(dtype, tmp_path):
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in again.parameters()} == {dtype}
    if dtype == torch.float64:
        assert_same(outputs(again), outputs(model), 1e-5, "float64 model")
    again.save_pretrained(tmp_path / "low")
    automatic = NeoBERTForMaskedLM.from_pretrained(tmp_path / "low", dtype="auto")
    assert automatic.dtype == dtype


def test_the_meta_device():
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig(**FIELDS))
        out = model(
            torch.ones(2, 6, dtype=torch.long, device="meta"),
            attention_mask=torch.ones(2, 6, device="meta"),
        )
    assert out.logits.shape == (2, 6, 200) and out.logits.device.type == "meta"


def test_published_aliases():
    assert neobert.NeoBERT is NeoBERTModel and neobert.NeoBERTLMHead is NeoBERTForMaskedLM
