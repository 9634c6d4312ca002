"""Tests of the native class: `python upstream/transformers/run_tests.py [pytest arguments]`.

First those against this repository's model, then the library's common model tests of the installed
version, which tests/tools/upstream_tests.py fetches from its source archive on PyPI.
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


# Both replace what the archive lacks: tests/pipelines, and the place of the class in the library.
PIPELINES = "class PipelineTesterMixin:\n    pass\n"
CONFTEST = "import native\n\nnative.load()\n"


def main():
    cache = ROOT / ".cache" / "upstream-tests"
    packages = upstream_tests.fetch_packages(cache).resolve()
    paths = [str(HERE), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder).resolve()
        upstream_tests.unpack_tests(upstream_tests.fetch_archive(cache), folder)
        place = folder / "tests" / "models" / "neobert"
        place.mkdir(parents=True)
        for name in ("models/__init__.py", "models/neobert/__init__.py"):
            (folder / "tests" / name).touch()
        test = HERE / "tests" / "test_modeling_neobert.py"
        (place / test.name).write_text(test.read_text())
        (folder / "tests" / "test_pipeline_mixin.py").write_text(PIPELINES)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        runs = [
            (ROOT, [str(HERE / "tests" / "test_equality.py"), "-c", os.devnull]),
            (folder, [str(place / test.name)]),
        ]
        codes = [
            subprocess.run([*pytest, *arguments, *sys.argv[1:]], cwd=where, env=environment)
            for where, arguments in runs
        ]
    return max(code.returncode for code in codes)


if __name__ == "__main__":
    sys.exit(main())
