"""Places and choices that options and the code behind them share. Imports nothing, so that --help is quick."""

from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tokenizer"
RECIPES = ROOT / "recipes"
DTYPES = ("auto", "float32", "float16", "bfloat16")
POOLINGS = ("mean", "cls")
