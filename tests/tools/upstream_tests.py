"""Run the common model tests of transformers on the NeoBERT classes.

    python tests/tools/upstream_tests.py [--cache DIR] [PYTEST ARGUMENTS]

The tests are those of the installed version of transformers. They are extracted from its source
archive on PyPI, which is downloaded once to a cache folder (--cache, by default
.cache/upstream-tests). Modules that the archive lacks are replaced by empty stubs. The exit status
is that of pytest.

These tests cover loading, the meta device, weight tying, resizing and saving. They do not compare
outputs with a reference, which the other tests of this repository do.
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

# Stubs of modules that the tests import and the source archive lacks.
STUBS = {
    "__init__.py": "",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}

# Small packages that only these tests import. They are installed into the cache folder if the
# environment lacks them.
PACKAGES = ("parameterized",)

# Tests that do not apply to a class, with the reason. All other skipped tests are skipped by
# transformers itself. Some mixins of transformers are not used: the pipeline mixin, because its
# tests need checkpoints from the Hub, and the mixins for training and for tensor and expert
# parallelism, because their tests generate text or need several processes.
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
    """The BERT-like ablation: learned positions, LayerNorm, GELU."""

    fields = {"position_embedding_type": "learned", "norm_type": "layer", "hidden_act": "gelu"}


for case, tests in INAPPLICABLE.items():
    for name, reason in tests.items():
        if hasattr(globals()[case], name):
            setattr(globals()[case], name, unittest.skip(reason)(getattr(globals()[case], name)))
'''  # noqa: E501


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def fetch_archive(cache):
    """Return the path of the source archive of the installed version of transformers.

    The archive is downloaded with pip if the cache lacks it.
    """
    version = transformers.__version__
    archive = cache / f"transformers-{version}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source = ["--no-deps", "--no-binary", "transformers", f"transformers=={version}"]
            subprocess.run([*PIP, "download", *source, "--dest", folder], check=True)
            (download,) = Path(folder).glob("transformers-*.tar.gz")
            download.replace(archive)
    return archive


def fetch_packages(cache):
    """Install the `PACKAGES` that cannot be imported into a folder, and return this folder."""
    folder = cache / "packages"
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None and not (folder / name).exists():
            install = ["install", "--no-deps", "--target", str(folder), name]
            subprocess.run([*PIP, *install], check=True)
    return folder


def unpack_tests(archive, folder):
    """Write the tests/ folder of the archive, the stubs and `MODEL_TEST` into `folder`."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, *parts = member.name.split("/", 2)
            if parts[:1] == ["tests"] and member.isfile() and "/models/" not in member.name:
                member.name = "/".join(parts)
                tar.extract(member, folder, filter="data")

    for name, text in STUBS.items():
        path = folder / "tests" / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    (folder / "tests" / "test_modeling_neobert.py").write_text(
        f"INAPPLICABLE = {INAPPLICABLE!r}\n{MODEL_TEST}"
    )


def main():
    """Run the tests and return the exit status of pytest."""
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
