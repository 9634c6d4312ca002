"""Paths, choices and help texts shared by the options and the code behind them.

Imports nothing else of the package, so `--help` stays fast.
"""

from pathlib import Path


PACKAGE = Path(__file__).resolve().parent.parent
# The bundled folders are part of the package in a wheel, and stand beside it in a clone.
_BUNDLED = PACKAGE if (PACKAGE / "tokenizer").is_dir() else PACKAGE.parent
TOKENIZER = _BUNDLED / "tokenizer"
RECIPES = _BUNDLED / "recipes"
# Time that a process waits for the main process, which may embed or tokenize texts for hours.
WAIT_SECONDS = 24 * 3600
DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
POOLINGS = ("mean", "cls")
# Default number of tokens per batch of an encoder. On the CPU, a larger batch exceeds the caches.
DEFAULT_CUDA_BATCH_TOKENS = 65536
DEFAULT_CPU_BATCH_TOKENS = 3072

# Help texts of options that several commands have.
DEVICE_HELP = "Device: cpu, cuda, cuda:1, ... By default CUDA if it is available."
TRUST_REMOTE_CODE_HELP = (
    "Run the Python code in the repository of the model. NeoBERT does not need this option."
)
