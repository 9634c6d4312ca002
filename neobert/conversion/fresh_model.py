"""Run by verify.py in a process of its own that does not know this package: loads a folder as a
user does and writes its outputs.

Arguments: the folder, the Auto class, a safetensors file of inputs, the safetensors file to write.
"""

import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


def main(folder, auto_class, inputs, outputs):
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    found = {
        kind: sorted(map(str, info.get(kind) or []))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    # Tied weights have no tensor of their own.
    found["missing_keys"] = [
        name
        for name in found["missing_keys"]
        if not (name == "decoder.weight" and model.config.tie_word_embeddings)
    ]
    if any(found.values()):
        sys.exit(f"loading it reported {found}")
    if type(model).__module__.split(".")[0] != "transformers_modules":
        sys.exit(f"it loaded {type(model)} and not the code in the folder")
    with torch.no_grad():
        result = model.eval()(**load_file(inputs))
    save_file(
        {name: value.contiguous() for name, value in result.items() if torch.is_tensor(value)},
        outputs,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
