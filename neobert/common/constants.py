"""Places and choices that options and the code behind them share. Imports nothing, so that --help
is quick."""

from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tokenizer"
DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
POOLINGS = ("mean", "cls")
# Tokens of a batch of an encoder where none are given; on the CPU more leave the caches.
CUDA_TOKENS, CPU_TOKENS = 65536, 3072
