"""Paths and choices shared by the options and the code behind them.

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
CUDA_TOKENS, CPU_TOKENS = 65536, 3072
