"""Build the page of examples/browser in one directory.

The directory contains the files of the page, the exported model, and files of two npm packages.

    python examples/browser/build.py --modules FOLDER/node_modules
    python -m http.server --directory examples/browser/site
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
# Files of the export that the page loads.
MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json", "onnx/model_quantized.onnx")


def build(model: Path, modules: Path, output: Path) -> None:
    """Write the directory completely or not at all.

    Args:
        model: Directory of the sentence encoder.
        modules: Directory "node_modules" with the npm packages.
        output: New directory.

    Raises:
        UserError: If a file of the npm packages is missing.
    """
    with tempfile.TemporaryDirectory() as scratch, new_folder(output) as site:
        for name in PAGE:
            shutil.copy(HERE / name, site)

        # The page loads the libraries from its own server, and needs no other.
        (site / "vendor").mkdir()
        for package, names in PACKAGES.items():
            for name in names:
                path = modules / package / name
                if not path.is_file():
                    raise UserError(
                        f"`modules` must contain {package}/{name}, got {modules}. Run `npm "
                        "install` with the versions of tests/engines/package.json."
                    )
                shutil.copy(path, site / "vendor")

        # The int8 graph has about a quarter of the size of the float32 graph.
        exported = Path(scratch) / "model"
        export(["onnx", str(model), str(exported), "--precisions", "int8"])
        for name in MODEL:
            target = site / "model" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(exported / name, target)


def main() -> None:
    """Build the site and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--modules", type=Path, required=True, help="Directory node_modules of the npm packages."
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=HERE.parent / "sentence-encoder",
        help="Directory of the sentence encoder.",
    )
    parser.add_argument("--output", type=Path, default=HERE / "site", help="New directory.")
    args = parser.parse_args()

    try:
        check_new(args.output, "--output")
        build(args.model, args.modules, args.output)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")

    size = sum(path.stat().st_size for path in args.output.rglob("*") if path.is_file())
    print(
        f"{args.output} ({size / 1e6:.1f} MB). Serve it with: python -m http.server --directory "
        f"{args.output}"
    )


if __name__ == "__main__":
    main()
