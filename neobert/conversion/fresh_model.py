"""Script that loads a converted folder as a user does, and writes its outputs.

`verify.py` runs it in another process, which has not imported this package. The arguments are the
folder, the Auto class, a safetensors file of inputs, and the safetensors file to write.
"""

import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


def main(folder: str, auto_class: str, inputs: str, outputs: str) -> None:
    """Load the folder, run the model on the inputs and write the outputs."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )

    # transformers initializes missing tensors with random values, and only logs a warning.
    missing = set(map(str, info.get("missing_keys") or []))
    if model.config.tie_word_embeddings:
        # A tied decoder is not stored.
        missing.discard("decoder.weight")
    problems = {
        "missing_keys": sorted(missing),
        "unexpected_keys": sorted(map(str, info.get("unexpected_keys") or [])),
        "mismatched_keys": sorted(map(str, info.get("mismatched_keys") or [])),
    }
    if any(problems.values()):
        sys.exit(f"loading it reported {problems}")
    # Code that a folder contains is imported as a module of transformers_modules. Classes of an
    # installed package would hide that the code in the folder is broken.
    if type(model).__module__.split(".")[0] != "transformers_modules":
        sys.exit(f"it loaded {type(model)} and not the code in the folder")

    with torch.no_grad():
        result = model.eval()(**load_file(inputs))
    # safetensors stores contiguous tensors only; outputs may also be None or a tuple.
    tensors = {name: value.contiguous() for name, value in result.items() if torch.is_tensor(value)}
    save_file(tensors, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
