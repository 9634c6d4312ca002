"""Test loading and saving.

Covers round trips with the code next to the weights, remote code, directories written by the other
major version of transformers, initialization of missing weights, tied weights, resized embeddings,
device maps and offloading.

The environment variable NEOBERT_EXCHANGE names a directory in which runs with different versions of
transformers exchange models.
"""

import ast
import filecmp
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from helpers.paths import ROOT
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
    """Yield loading options for remote code, with an empty cache of its modules.

    Modules that remote code imports are removed after the test.
    """
    modules = str(tmp_path / "hf_modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", modules, raising=False)
    path = list(sys.path)

    def remove_modules():
        names = [name for name in sys.modules if name.startswith("transformers_modules")]
        return {name: sys.modules.pop(name) for name in names}

    previous_modules = remove_modules()
    yield {"trust_remote_code": True, "dtype": torch.float32}
    sys.path[:] = path
    remove_modules()
    sys.modules.update(previous_modules)


def files(folder):
    """Return the names of the files in a directory."""
    return {path.name for path in folder.iterdir() if path.is_file()}


def saved_config(folder):
    """Return the contents of config.json."""
    return json.loads((folder / "config.json").read_text())


def load(model_class, folder, **options):
    """Load a model in float32 and return it with the names of missing tensors."""
    options |= {"output_loading_info": True, "dtype": torch.float32}
    model, info = model_class.from_pretrained(folder, **options)
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model, set(info["missing_keys"])


def outputs(model):
    """Return the first output of a model for a fixed padded batch."""
    ids, mask = random_batch([9, 5])
    if type(model).__name__ == "NeoBERTForMultipleChoice":
        ids = ids[None]
        mask = mask[None]
    with torch.no_grad():
        return model.eval()(ids, attention_mask=mask)[0]


# ------------------------------------------------------------------------------------------------
# Round trips


@every_head
def test_save_load_save_is_byte_equal(head, tmp_path):
    """Saving a loaded model writes the same bytes, and the code is saved with the weights."""
    model = make_model(HEADS[head], num_labels=3)
    first = tmp_path / "first"
    second = tmp_path / "second"
    model.save_pretrained(first)
    assert files(first) == SAVED, "The code must be saved with the weights."

    loaded, missing = load(HEADS[head], first)
    loaded.save_pretrained(second)
    assert not missing and not any(filecmp.cmpfiles(first, second, SAVED, shallow=False)[1:])
    # The last bit of some kernels depends on the memory addresses of the tensors.
    assert_same(outputs(loaded), outputs(model), 1e-6)


@every_head
def test_saved_config(head, tmp_path):
    """config.json contains the published class names, which other tools compare."""
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
    """Saving a loaded configuration does not append class names to `architectures`."""
    make_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    for _ in range(2):
        NeoBERTConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    names = ["NeoBERTLMHead", "NeoBERTForMaskedLM"]
    assert saved_config(tmp_path)["architectures"] == names


def test_save_pretrained_parents_and_main_process(tmp_path):
    """`save_pretrained` creates missing parents, and writes no code outside of the main process."""
    model = make_model(NeoBERTModel)
    model.save_pretrained(tmp_path / "a" / "new" / "folder")
    assert files(tmp_path / "a" / "new" / "folder") == SAVED
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not set(tmp_path.glob("second/*.py")) and not (tmp_path / "second/config.json").exists()


def test_push_to_hub_uploads_the_code(tmp_path, monkeypatch):
    """`save_pretrained(push_to_hub=True)` uploads the three code files, also of a second upload."""
    uploaded = []

    def create_commit(*args, operations, **kwargs):
        uploaded.append({operation.path_in_repo for operation in operations})

    def create_repo(*args, **kwargs):
        return SimpleNamespace(repo_id="me/model")

    # transformers 4 imports functions, and version 5 calls methods.
    for function in (create_commit, create_repo):
        name = function.__name__
        monkeypatch.setattr(f"transformers.utils.hub.{name}", function, raising=False)
        monkeypatch.setattr(f"transformers.modeling_utils.{name}", function, raising=False)
        monkeypatch.setattr(huggingface_hub.HfApi, name, function)
    model = make_model(NeoBERTForMaskedLM)
    for _ in range(2):
        model.save_pretrained(str(tmp_path / "model"), push_to_hub=True, repo_id="me/model")
    code = {f"{name}_neobert.py" for name in ("attention", "configuration", "modeling")}
    assert all(code | {"config.json", "model.safetensors"} <= names for names in uploaded)
    assert len(uploaded) == 2


def test_unknown_tensors_of_a_decoder_are_reported(tmp_path):
    """A masked LM reports unknown tensors of its decoder; other classes ignore them."""
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
    """Saved tensors have the published names, and a model in several files loads unchanged."""
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
# Remote code


@every_head
def test_remote_code(head, tmp_path, remote):
    """A saved directory loads through the Auto classes with its own code, and saves that code."""
    model = make_model(HEADS[head], num_labels=3)
    first = tmp_path / "first"
    second = tmp_path / "second"
    model.save_pretrained(first)

    loaded = getattr(transformers, head).from_pretrained(first, **remote)
    assert type(loaded).__name__ == HEADS[head].__name__
    assert_same(outputs(loaded), outputs(model), 1e-6)

    loaded.save_pretrained(second)
    assert files(second) == SAVED and saved_config(first) == saved_config(second)
    others = SAVED - {"config.json"}
    assert not any(filecmp.cmpfiles(first, second, others, shallow=False)[1:])


def rename_model_type(folder):
    """Rename the model type of a saved directory.

    The installed package has registered the type "neobert" and would load the directory with its
    own classes. Only the code in the directory can load another type.
    """
    config = saved_config(folder) | {"model_type": "neobert-elsewhere"}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "configuration_neobert.py"
    code = path.read_text().replace('"neobert"', '"neobert-elsewhere"')
    path.write_text(code)


def test_unregistered_model_type_loads_its_own_code(tmp_path, remote):
    """A directory of a model type that no package has registered loads with its own code.

    The model can be saved, loaded again, and switched to another attention implementation.
    """
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path / "first")
    rename_model_type(tmp_path / "first")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "first", **remote)
    assert type(loaded).__module__.startswith("transformers_modules")
    assert torch.equal(outputs(loaded), outputs(model))

    loaded.save_pretrained(tmp_path / "second")
    reloaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "second", **remote)
    assert torch.equal(outputs(reloaded), outputs(model))

    base = AutoModel.from_pretrained(tmp_path / "second", attn_implementation="eager", **remote)
    assert base.config._attn_implementation == "eager"
    loaded.set_attn_implementation("eager")
    assert torch.equal(outputs(base), outputs(loaded.model))


class Unregistered(NeoBERTForSequenceClassification):
    """Subclass of a user, not registered for an Auto class."""


def test_subclass_is_saved_with_the_code_of_its_base(tmp_path, remote):
    """A subclass is saved with the code and the auto_map of its base class."""
    make_model(Unregistered).save_pretrained(tmp_path)
    assert files(tmp_path) == SAVED and saved_config(tmp_path)["auto_map"] == AUTO_MAP
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, **remote)
    assert type(loaded).__name__ == "NeoBERTForSequenceClassification"


def test_custom_remote_class_stays_in_auto_map(tmp_path, remote):
    """A class that a user adds to a directory stays in its auto_map, over two saves.

    The class is loaded and registered as `AutoModel...from_pretrained` does without this package.
    """
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


def test_auto_classes_support_neobert(tmp_path):
    """With this package installed, the Auto classes load a directory without code or auto_map."""
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


def test_attention_file_can_be_imported_first():
    """The Auto classes support NeoBERT even if the attention file is imported first.

    The attention file imports transformers, after which all classes are registered. This must wait
    until the attention file itself is complete. Only a new process has not imported any of them.
    """
    code = "import neobert.attention_neobert, transformers as t; t.AutoConfig.for_model('neobert')"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------
# The other major version of transformers


EXCHANGED = {
    "plain": {},
    "learned": LEARNED,
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": YARN,
}


@pytest.mark.parametrize("variant", EXCHANGED)
@pytest.mark.parametrize("written_by", ("4.57.6", "5.23.0"))
def test_configurations_of_both_major_versions(written_by, variant, tmp_path):
    """config.json files written by both major versions of transformers describe the same model.

    The files are in tests/data. Their auto_map names the files that a saved directory has today.
    """
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
def test_models_of_other_transformers_versions_load(variant, tmp_path, remote):
    """Models saved by other versions of transformers load with the code that they were saved with.

    The test also saves its own model in the exchange directory, for runs with other versions.
    """
    exchange = os.environ.get("NEOBERT_EXCHANGE")
    if not exchange:
        pytest.skip("NEOBERT_EXCHANGE must name a directory to exchange models in.")

    model = make_model(NeoBERTForMaskedLM, seed=3, **EXCHANGED[variant])
    model.save_pretrained(Path(exchange) / f"{variant}-{transformers.__version__}")
    for folder in sorted(Path(exchange).glob(f"{variant}-*")):
        loaded = AutoModelForMaskedLM.from_pretrained(folder, **remote)
        assert_same(outputs(loaded), outputs(model), 1e-6, f"output of the model in {folder.name}")
        saved = tmp_path / folder.name
        loaded.save_pretrained(saved)
        assert filecmp.cmp(saved / "model.safetensors", folder / "model.safetensors", shallow=False)


# ------------------------------------------------------------------------------------------------
# Initialization


def test_initialization_matches_the_paper():
    """Weights are initialized as in the paper.

    Linear layers and embeddings are uniform within their bounds, heads are normal, norms are one
    and biases are zero.
    """
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
            assert abs(p.std() - 0.04) < 0.002 and p.abs().max() > 0.1, (
                f"{name} must be sampled from normal(0, 0.04)."
            )
        elif name != "classifier.weight":
            bound = 0.05 if name == "model.encoder.weight" else 0.03
            assert 0.98 * bound < p.abs().max() <= bound, f"{name} must be uniform within {bound}."
            assert abs(p.std() - bound / 3**0.5) < 0.03 * bound and abs(p.mean()) < 0.02 * bound


@pytest.mark.parametrize(
    "field, value",
    [
        ("position_embedding_type", "absolute"),
        ("classifier_pooling", "max"),
        ("hidden_act", "relu"),
        ("norm_type", "batch"),
        ("num_attention_heads", 5),
    ],
)
def test_invalid_overrides_of_from_pretrained(field, value, golden):
    """A value that the constructor rejects is also rejected as an argument of `from_pretrained`.

    transformers sets such values after the configuration was created. With "absolute", the model
    would have no positions at all.
    """
    with pytest.raises(ValueError, match=f"`(hidden_size|{field})` must be"):
        NeoBERTForSequenceClassification.from_pretrained(golden / "neobert_tiny", **{field: value})


@pytest.mark.parametrize("head", list(HEADS)[2:])
def test_new_head_on_a_loaded_backbone(head, golden):
    """A missing head is initialized as in the paper, and no loaded weight changes."""
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
            # A uniform distribution with this standard deviation would end at 0.035.
            assert state[name].numel() < 1000 or state[name].abs().max() > 0.045


def test_backbone_weights_are_kept_when_the_head_changes(tmp_path):
    """The backbone keeps its weights when a head is dropped and when a new one is added."""
    head = make_model(NeoBERTForSequenceClassification, num_labels=3)
    head.save_pretrained(tmp_path / "head")
    base = NeoBERTModel.from_pretrained(tmp_path / "head", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    new_head, missing = load(NeoBERTForSequenceClassification, tmp_path / "base")
    assert missing == {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"}
    for p, q, r in zip(head.model.parameters(), base.parameters(), new_head.model.parameters()):
        assert torch.equal(p, q) and torch.equal(p, r)


# ------------------------------------------------------------------------------------------------
# Tied weights and resized embeddings


def test_tie_word_embeddings(tmp_path):
    """The decoder shares the weight of the embedding only with `tie_word_embeddings`.

    A shared weight is stored once, and is shared again after loading.
    """
    untied = make_model(NeoBERTForMaskedLM)
    assert untied.decoder.weight is not untied.model.encoder.weight
    tied = make_model(NeoBERTForMaskedLM, tie_word_embeddings=True)
    assert tied.decoder.weight is tied.model.encoder.weight

    tied.save_pretrained(tmp_path)
    assert "decoder.weight" not in load_file(tmp_path / "model.safetensors"), (
        "The shared weight must be stored once."
    )
    loaded, missing = load(NeoBERTForMaskedLM, tmp_path)
    assert loaded.decoder.weight is loaded.model.encoder.weight and not missing
    assert torch.equal(outputs(loaded), outputs(tied))


@pytest.mark.parametrize("size", (150, 260))
@pytest.mark.parametrize("tied", (False, True))
@torch.no_grad()
def test_resize_token_embeddings(tied, size, tmp_path):
    """After `resize_token_embeddings`, remaining tokens keep their logits.

    The new vocabulary size applies to the checks of IDs and labels, and is saved.
    """
    model = make_model(NeoBERTForMaskedLM, tie_word_embeddings=tied)
    ids = random_batch([9, 5], vocab_size=150)[0]
    before = model(ids).logits
    bias = model.decoder.bias.clone()

    model.resize_token_embeddings(size)
    kept_size = min(size, 200)
    assert model.config.vocab_size == size and model.model.encoder.weight.shape == (size, 64)
    assert model.decoder.weight.shape == (size, 64) and model.decoder.bias.shape == (size,)
    assert torch.equal(model.decoder.bias[:kept_size], bias[:kept_size])
    assert (model.decoder.weight is model.model.encoder.weight) == tied
    assert_same(model(ids).logits[..., :150], before[..., :150], 1e-6, "logits of the old tokens")

    last = torch.full_like(ids, size - 1)
    assert model(last, labels=last).loss.isfinite()
    for inputs in ({"labels": last + 1}, {"input_ids": last + 1}):
        with pytest.raises(ValueError, match=f"from 0 to {size - 1}"):
            model(**{"input_ids": last, **inputs})

    model.save_pretrained(tmp_path)
    assert torch.equal(load(NeoBERTForMaskedLM, tmp_path)[0](ids).logits, model(ids).logits)


# ------------------------------------------------------------------------------------------------
# Devices and published names


@pytest.mark.parametrize("attention", ("sdpa", "eager"))
@pytest.mark.parametrize("unpad", (True, False))
@pytest.mark.parametrize("pooling", ("cls", "mean"))
@pytest.mark.parametrize("head", HEADS)
def test_last_blocks_on_another_device(head, pooling, unpad, attention):
    """Outputs and losses are computed if the last blocks are on another device than the inputs.

    `device_map="auto"` divides a model over all GPUs in this way. The other device here is "meta",
    whose kernels raise an error for tensors of two devices, and compute shapes only.
    """
    hooks = pytest.importorskip("accelerate.hooks", reason="device_map needs accelerate")
    model = make_model(HEADS[head], classifier_pooling=pooling)
    model.set_attn_implementation(attention)
    backbone = model._backbone()
    late = [*backbone.transformer_encoder[1:], backbone.layer_norm]
    if model is not backbone:
        late += [module for name, module in model.named_children() if name != "model"]
    for module in late:
        hooks.add_hook_to_module(
            module.to("meta"), hooks.AlignDevicesHook("meta", place_submodules=True)
        )

    ids, mask = random_batch([9, 5])
    labels = {
        "AutoModelForMaskedLM": {"labels": ids},
        "AutoModelForSequenceClassification": {"labels": torch.tensor([0, 1])},
        "AutoModelForTokenClassification": {"labels": ids % 2},
        "AutoModelForMultipleChoice": {"labels": torch.tensor([1])},
        "AutoModelForQuestionAnswering": {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([2, 3]),
        },
    }.get(head, {})
    if head == "AutoModelForMultipleChoice":
        ids, mask = ids[None], mask[None]
    outputs = model(ids, mask, unpad_inputs=unpad, **labels)
    assert {value.device.type for value in outputs.values()} == {"meta"}
    assert not labels or outputs.loss.shape == ()


@pytest.mark.parametrize("device_map", ("auto", "cpu", {"": "cpu"}))
def test_device_map(device_map, tmp_path):
    """A model loaded with a `device_map` gives the same outputs."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    model.save_pretrained(tmp_path)
    loaded, _ = load(NeoBERTForMaskedLM, tmp_path, device_map=device_map)
    loaded = loaded if device_map == "auto" else loaded.to("cpu")
    assert_same(outputs(loaded), outputs(model), what="output of a model with a device map")


def test_disk_offload_by_blocks(tmp_path):
    """A model whose blocks are offloaded to disk and loaded one by one gives the same outputs."""
    accelerate = pytest.importorskip("accelerate", reason="offloading needs accelerate")
    model = make_model(NeoBERTForMaskedLM)
    expected = outputs(model)
    names = ("model.encoder", "model.embedding_dropout", "model.layer_norm", "decoder")
    devices = dict.fromkeys([*names, "model.transformer_encoder.0"], "cpu")
    devices |= {f"model.transformer_encoder.{layer}": "disk" for layer in (1, 2)}
    offloaded = accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=tmp_path)
    assert offloaded.model.transformer_encoder[1].qkv.weight.device.type == "meta"
    assert torch.equal(outputs(offloaded), expected)


def test_published_aliases():
    """The package exports the class names of the published code."""
    assert neobert.NeoBERT is NeoBERTModel and neobert.NeoBERTLMHead is NeoBERTForMaskedLM


def names_from_transformers(path):
    """Yield the module and the name of every import from transformers, except for types.

    Args:
        path: Python file.
    """
    todo = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        # Imports for type checkers are not executed, and those in a `try` may fail.
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_typing or isinstance(node, ast.Try):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            yield from ((node.module, alias.name) for alias in node.names)
        todo += ast.iter_child_nodes(node)


def test_imports_from_transformers_exist_in_this_version():
    """All commands can be imported with every version of transformers that is supported."""
    paths = [*(ROOT / "neobert").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for module, name in names_from_transformers(path)
        if not hasattr(importlib.import_module(module), name)
    ]
    assert not missing
