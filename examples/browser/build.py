"""Builds the page of examples/browser: the page's own files, the exported model, and what it needs
of two npm packages, in one folder.

    python examples/browser/build.py --modules FOLDER/node_modules \\
        [--model examples/sentence-encoder] [--output examples/browser/site]

Then serve that folder: python -m http.server --directory examples/browser/site
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from neobert.common.errors import UserError
from neobert.common.folders import check_new, new_folder
from neobert.export.command import main as export


HERE = Path(__file__).resolve().parent
PAGE = ("index.html", "style.css", "app.js", "sentences.txt")
# The build of ONNX Runtime without WebGPU: half the size, and fast enough for a small encoder.
PACKAGES = {
    "@huggingface/transformers/dist": ("transformers.web.min.js",),
    "onnxruntime-web/dist": ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"),
}
MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json", "onnx/model_quantized.onnx")


def build(model, modules, output):
    """Writes the folder completely or not at all."""
    with tempfile.TemporaryDirectory() as scratch, new_folder(output) as site:
        for name in PAGE:
            shutil.copy(HERE / name, site)
        for folder, names in PACKAGES.items():
            for name in names:
                if not (modules / folder / name).is_file():
                    raise UserError(
                        f"{modules} has no {folder}/{name}; in it: npm install "
                        "(tests/engines/package.json has the versions)"
                    )
                (site / "vendor").mkdir(exist_ok=True)
                shutil.copy(modules / folder / name, site / "vendor")
        exported = Path(scratch) / "model"
        export(["onnx", str(model), str(exported), "--precisions", "int8"])
        for name in MODEL:
            (site / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(exported / name, site / "model" / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=HERE.parent / "sentence-encoder")
    parser.add_argument("--output", type=Path, default=HERE / "site")
    given = parser.parse_args()
    try:
        check_new(given.output, "--output")
        build(given.model, given.modules, given.output)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    size = sum(path.stat().st_size for path in given.output.rglob("*") if path.is_file())
    print(
        f"{given.output} ({size / 1e6:.1f} MB); open it with: python -m http.server --directory "
        f"{given.output}"
    )


if __name__ == "__main__":
    main()
