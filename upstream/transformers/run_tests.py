"""Run the tests of the native class.

    python upstream/transformers/run_tests.py [pytest arguments]

First the native class is compared with this repository's model. Then the common model tests of the
installed transformers run, which tests/tools/upstream_tests.py fetches from the archive on PyPI.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

import upstream_tests  # noqa: E402


# Replacements for what the archive lacks: tests/pipelines, and the registration of the class.
PIPELINES = "class PipelineTesterMixin:\n    pass\n"
CONFTEST = "import native\n\nnative.load()\n"


def main() -> int:
    """Run both test suites, and return the larger exit code."""
    cache = ROOT / ".cache" / "upstream-tests"
    packages = upstream_tests.fetch_packages(cache).resolve()
    paths = [str(HERE), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}

    # The arguments of the command line, such as -k, apply to both suites.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]

    with tempfile.TemporaryDirectory() as scratch:
        # Lay out the tests as in a clone of transformers.
        folder = Path(scratch).resolve()
        upstream_tests.unpack_tests(upstream_tests.fetch_archive(cache), folder)

        target = folder / "tests" / "models" / "neobert"
        target.mkdir(parents=True)
        for name in ("models/__init__.py", "models/neobert/__init__.py"):
            (folder / "tests" / name).touch()
        test = HERE / "tests" / "test_modeling_neobert.py"
        (target / test.name).write_text(test.read_text())
        (folder / "tests" / "test_pipeline_mixin.py").write_text(PIPELINES)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")

        # (working directory, arguments); os.devnull keeps pytest from reading this repository's configuration.
        runs = [
            (ROOT, [str(HERE / "tests" / "test_equality.py"), "-c", os.devnull]),
            (folder, [str(target / test.name)]),
        ]
        codes = []
        for directory, arguments in runs:
            command = [*pytest, *arguments, *sys.argv[1:]]
            codes.append(subprocess.run(command, cwd=directory, env=environment).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
