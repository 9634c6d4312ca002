"""Runs transformers' own common model tests against this model: `python
tests/tools/upstream_tests.py [pytest arguments]`.

The tests of the very version that is installed come out of its source archive on PyPI, fetched into
a cache folder the first time (--cache DIR, by default .cache/upstream-tests) and unpacked into a
temporary one; nothing of it is kept here. Modules that the archive leaves out are replaced by empty
stand-ins. The exit status is pytest's.

These tests are strong on loading, the meta device, tying, resizing and saving, and blind to
arithmetic: see tests/ for that.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers


ROOT = Path(__file__).resolve().parents[2]

# Modules that the tests import and the source archive lacks.
STAND_INS = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}

# Small packages that the tests import and the project does not need: put beside the archive if the
# environment lacks them.
PACKAGES = ("parameterized",)

# Tests that cannot apply to a class, with the reason. Everything else that skips does so by
# transformers' own rules. The pipeline mixin is left out because its tests need checkpoints from
# the Hub; those of training and of parallel tensors and experts because they generate text or need
# several processes.
_NO_ROPE = "learned positions have no RoPE to scale and end at max_position_embeddings"
_OF_ROPE = "from_config_0_linear", "from_config_1_dynamic", "from_config_2_yarn", "frequencies"
INAPPLICABLE = {
    "AblationM0ModelTest": {f"test_model_rope_scaling_{name}": _NO_ROPE for name in _OF_ROPE}
}

MODEL_TEST = '''
import unittest

import neobert
from neobert import NeoBERTConfig
from transformers.models.auto import modeling_auto
from transformers.testing_utils import require_torch, torch_device

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask


NAMES = {
    "MODEL_MAPPING_NAMES": "NeoBERTModel",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "NeoBERTForMaskedLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "NeoBERTForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "NeoBERTForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "NeoBERTForQuestionAnswering",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "NeoBERTForMultipleChoice",
}
# The common tests look a class's task up by its name.
for mapping, name in NAMES.items():
    getattr(modeling_auto, mapping)["neobert"] = name


class NeoBERTModelTester:
    def __init__(self, parent, **fields):
        self.parent = parent
        self.batch_size, self.seq_length, self.num_choices, self.is_training = 5, 7, 4, True
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4
        self.vocab_size, self.num_labels = 99, 3
        self.fields = fields

    def get_config(self):
        return NeoBERTConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=48,
            max_position_embeddings=128,
            classifier_dropout=0.0,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 1) + 1
        mask = random_attention_mask([self.batch_size, self.seq_length])
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


class NeoBERTConfigTester(ConfigTester):
    def create_and_test_config_common_properties(self):
        """transformers 4 also makes configurations of hidden_size 0, which this class refuses; transformers 5 asks for the fields only."""
        config = self.config_class(**self.inputs_dict)
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
            self.parent.assertTrue(hasattr(config, name), name)


class Common(ModelTesterMixin):
    all_model_classes = tuple(getattr(neobert, name) for name in NAMES.values())
    pipeline_model_mapping = {}
    test_head_masking = False
    test_pruning = False
    fields = {}

    def setUp(self):
        self.model_tester = NeoBERTModelTester(self, **self.fields)
        self.config_tester = NeoBERTConfigTester(self, config_class=NeoBERTConfig, hidden_size=32, num_attention_heads=4)

    def test_config(self):
        self.config_tester.run_common_tests()


@require_torch
class NeoBERTModelTest(Common, unittest.TestCase):
    pass


@require_torch
class AblationM0ModelTest(Common, unittest.TestCase):
    """The BERT-like rung of the ablation ladder: learned positions, LayerNorm, GELU."""

    fields = {"position_embedding_type": "learned", "norm_type": "layer", "hidden_act": "gelu"}


for case, tests in INAPPLICABLE.items():
    for name, reason in tests.items():
        if hasattr(globals()[case], name):
            setattr(globals()[case], name, unittest.skip(reason)(getattr(globals()[case], name)))
'''  # noqa: E501


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def fetch_archive(cache):
    """Path of transformers' source archive for the installed version, downloaded with pip where the
    cache lacks it."""
    version = transformers.__version__
    archive = cache / f"transformers-{version}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source = ["--no-deps", "--no-binary", "transformers", f"transformers=={version}"]
            subprocess.run([*PIP, "download", *source, "--dest", folder], check=True)
            (found,) = Path(folder).glob("transformers-*.tar.gz")
            found.replace(archive)
    return archive


def fetch_packages(cache):
    """Folder with those of `PACKAGES` that cannot be imported."""
    folder = cache / "packages"
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None and not (folder / name).exists():
            install = ["install", "--no-deps", "--target", str(folder), name]
            subprocess.run([*PIP, *install], check=True)
    return folder


def unpack_tests(archive, folder):
    """Puts the archive's tests/ folder, the stand-ins and our test file into `folder`."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, *place = member.name.split("/", 2)
            if place[:1] == ["tests"] and member.isfile() and "/models/" not in member.name:
                member.name = "/".join(place)
                tar.extract(member, folder, filter="data")
    for name, text in STAND_INS.items():
        path = folder / "tests" / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (folder / "tests" / "test_modeling_neobert.py").write_text(
        f"INAPPLICABLE = {INAPPLICABLE!r}\n{MODEL_TEST}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "upstream-tests")
    arguments, pytest_arguments = parser.parse_known_args()
    archive = fetch_archive(arguments.cache)
    packages = fetch_packages(arguments.cache)
    paths = [str(packages.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder).resolve()
        unpack_tests(archive, folder)
        (folder / "pytest.ini").write_text("[pytest]\n")
        print(
            f"transformers {transformers.__version__}: the common model tests of {archive.name}",
            flush=True,
        )
        options = ["-rs", "-p", "no:cacheprovider", "-W", "ignore"]
        command = [sys.executable, "-m", "pytest", *options, "tests/test_modeling_neobert.py"]
        return subprocess.run([*command, *pytest_arguments], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
