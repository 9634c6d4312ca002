"""Breaks the model in one place at a time and shows that the tests notice: `python tests/tools/mutants.py [--output results/mutants.md]`.

Every mutant is applied to a copy of the checkout in a temporary folder, where the model's tests run until three have failed. The table
says which. Exit status 1 if a mutant survives, or if the tests fail without one.
"""

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401 (imported once for every fork)
from tqdm import tqdm


ROOT = Path(__file__).resolve().parents[2]
MODEL = "modeling_neobert.py"
CORE = ("golden", "model_api", "attention")

LOW_NORM = """class _LowNorm(nn.RMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _norm(config):
"""
PARENT_INIT = """        if isinstance(module, _TaskHeadModel):
            for child in module.children():
                if isinstance(child, nn.Linear):
                    nn.init.normal_(child.weight, mean=0.0, std=self.config.classifier_init_range)
                    nn.init.zeros_(child.bias)
"""
LEAF_INIT = """        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.classifier_init_range)
            nn.init.zeros_(module.bias)
"""

# name: ((text in modeling_neobert.py, what replaces it), ...); test files to run, the likeliest first.
MUTANTS = {
    "sdpa ignores the padding mask": (
        (
            (
                "allowed = _visible(mask)[:, None, None, :] if mask is not None else None",
                'allowed = _visible(mask)[:, None, None, :] if mask is not None and implementation != "sdpa" else None',
            ),
        ),
        CORE,
    ),
    "every implementation ignores the padding mask": ((("    return attention_mask.to(torch.bool)\n", "    return None\n"),), CORE),
    "no RoPE": ((('if self.config.position_embedding_type == "rope":', "if False:"),), CORE),
    "position_ids ignored": ((("position_ids = _checked_positions(position_ids, shape)", "position_ids = None"),), ("rope",)),
    "RoPE angles in bfloat16": (
        (
            (
                "angles = position_ids[..., None].float() * frequencies.float()",
                "angles = (position_ids[..., None].bfloat16() * frequencies.bfloat16()).float()",
            ),
        ),
        ("rope",),
    ),
    "RoPE rotates halves in place of adjacent pairs": (
        (
            (
                "pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))",
                "pairs = torch.view_as_complex(x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())",
            ),
        ),
        CORE,
    ),
    "eager scale x1.5": ((("key.transpose(-1, -2) * scaling", "key.transpose(-1, -2) * scaling * 1.5"),), CORE),
    "SwiGLU halves swapped": ((("gate, value = self.w12", "value, gate = self.w12"),), CORE),
    "RMSNorm in bfloat16": (
        (("norm = NeoBERTRMSNorm if", "norm = _LowNorm if"), ("def _norm(config):\n", LOW_NORM)),
        ("model_api",),
    ),
    "last hidden state taken before the norm": (
        (("        hidden = self.layer_norm(hidden)\n", "        hidden = hidden * self.layer_norm.weight.new_ones(())\n"),),
        CORE,
    ),
    "last of hidden_states not normed": (
        (
            (
                "        hidden = self.layer_norm(hidden)\n        if all_hidden is not None:\n            all_hidden.append(hidden)\n",
                "        if all_hidden is not None:\n            all_hidden.append(hidden)\n        hidden = self.layer_norm(hidden)\n",
            ),
        ),
        CORE,
    ),
    "ignored labels counted in the loss": (
        (
            (
                "return _mean(total, (labels != -100).sum(), num_items_in_batch)",
                "return _mean(total, (labels != -99).sum(), num_items_in_batch)",
            ),
        ),
        ("heads",),
    ),
    "num_items_in_batch ignored": ((("    if num_items_in_batch is None:\n", "    if True:\n"),), ("heads",)),
    "attention dropout active in eval": (
        (("dropout=self.config.attention_dropout if self.training else 0.0", "dropout=self.config.attention_dropout"),),
        ("model_api",),
    ),
    "residual dropout active in eval": (
        (("hidden = hidden + self.dropout(attended)", "hidden = hidden + F.dropout(attended, self.dropout.p)"),),
        ("model_api",),
    ),
    "parent-level initialisation": (((LEAF_INIT, PARENT_INIT),), ("loading",)),
    "in-place initialisation": (
        (
            ("nn.init.uniform_(module.weight, -self.config.decoder", "module.weight.data.uniform_(-self.config.decoder"),
            ("nn.init.uniform_(module.weight, -self.config.embedding", "module.weight.data.uniform_(-self.config.embedding"),
            ("nn.init.normal_(module.weight, mean=0.0,", "module.weight.data.normal_(mean=0.0,"),
        ),
        ("loading", "remote_code_rules"),
    ),
    "checkpointing recomputes nothing": (
        (("class NeoBERTBlock(GradientCheckpointingLayer):", "class NeoBERTBlock(nn.Module):"),),
        ("compile_export",),
    ),
    "causal attention in what reads is_causal": ((("    is_causal = False\n", "    is_causal = True\n"),), ("attention",)),
    "causal eager attention": (
        (
            (
                "    weights = scores.softmax(dim=-1",
                "    scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -1e9)\n    weights = scores.softmax(dim=-1",
            ),
        ),
        CORE,
    ),
    "packed texts see each other: eager, sdpa": (
        (("groups = layout.groups\n", "groups = [[1, sum(layout.lengths)]]\n"),),
        ("attention",),
    ),
    "packed texts see each other: flex": (
        (("return texts[q] == texts[k]", "return texts[q] >= texts[k] * 0"),),
        ("attention",),
    ),
    "packed texts see each other: user functions, compiled": (
        (("allowed = (texts[:, None] == texts)[None, None]", "allowed = (texts[:, None] >= texts * 0)[None, None]"),),
        ("attention",),
    ),
    "packing arguments ignored": (
        (('cu_seq_lens, other = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")', "cu_seq_lens, other = None, None"),),
        ("attention",),
    ),
    "restarting positions are not packing": ((("if len(starts) < 2 or", "if True or"),), ("attention",)),
    "head interleaving of qkv changed": (
        (("unflatten(-1, (self.num_heads, 3, -1))", "unflatten(-1, (3, self.num_heads, -1)).transpose(-3, -2)"),),
        CORE,
    ),
    "mean pooling over padding": (
        (
            ("(hidden * mask[..., None]).sum(dim=1,", "hidden.sum(dim=1,"),
            ("/ mask.sum(dim=-1, keepdim=True)", "/ torch.ones_like(mask).sum(dim=-1, keepdim=True)"),
        ),
        ("heads",),
    ),  # fmt: skip
    "parts of a large batch take a text too many": ((("            if length > room:\n", "            if room <= 0:\n"),), ("packing",)),
    "compiled texts that start again see each other": (
        (("starts = torch.where(fits, starts, tokens == 0)", "starts = tokens == 0"),),
        ("compile_export",),
    ),
    "an answer may be padding": (
        (("attention_mask[..., None] == 0, torch.finfo", "attention_mask[..., None] < 0, torch.finfo"),),
        ("heads",),
    ),
    "first column pooled in place of the first real token": (
        (("return mask.to(torch.int32).argmax(dim=-1)", "return mask.to(torch.int32).argmax(dim=-1) * 0"),),
        ("heads",),
    ),
}


def copy_checkout(folder):
    """The package and its tests as `folder`/neobert."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "demo", "examples", "build", "dist", "*.egg-info", "docs")
    shutil.copytree(ROOT, folder / "neobert", ignore=ignore)
    return folder / "neobert"


def run_tests(checkout, names, maxfail):
    """Names of the tests that failed, and pytest's last line.

    The tests run in a fork of this process, which has imported torch and transformers but nothing of the package.
    """
    files = [f"tests/test_{name}.py" for name in dict.fromkeys(names)]
    log = checkout.parent / "log"
    child = os.fork()
    if child == 0:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(checkout)
        sys.path.insert(0, str(checkout.parent))
        sys.dont_write_bytecode = True
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=no", f"--maxfail={maxfail}"]
        code = pytest.main([*options, *files])
        sys.stdout.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text()
    if status not in (0, 1, 2):
        raise SystemExit(f"pytest could not run: {output[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) tests/test_(\S+?)\.py(?:::(\S+))?", output, flags=re.MULTILINE)
    lines = [line for line in output.splitlines() if line.strip()]
    return [f"{file}::{test}" if test else file for file, test in failed], lines[-1] if lines else ""


def apply(source, changes, name):
    for old, new in changes:
        if old not in source:
            raise SystemExit(f"Mutant {name!r}: {MODEL} does not contain {old!r}; the mutant must follow the code.")
        source = source.replace(old, new)
    return source


def load_results_helpers():
    """common/results.py under another package's name: this process must not import the package, whose broken copies its forks import."""
    for name, folder in (("helpers", ROOT), ("helpers.common", ROOT / "common")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("helpers.common.results")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="markdown file to write")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: value for name, value in MUTANTS.items() if arguments.only in name}
    results = load_results_helpers()
    facts = results.environment()
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_checkout(Path(folder))
        source = (checkout / MODEL).read_text()
        sources = {name: apply(source, changes, name) for name, (changes, _) in chosen.items()}
        everything = [name for _, files in chosen.values() for name in files]
        failed, control = run_tests(checkout, everything, 3)
        if failed:
            raise SystemExit(f"The tests fail without a mutant: {', '.join(failed)}")
        rows, survivors = [], []
        for name, (_, files) in tqdm(chosen.items(), unit="mutant"):
            (checkout / MODEL).write_text(sources[name])
            failed, _ = run_tests(checkout, files, 3)
            rows.append([name, ", ".join(f"`{test}`" for test in failed) or "**survived**"])
            if not failed:
                survivors.append(name)
    facts = [[name, str(value)] for name, value in facts.items()]
    text = "\n".join(
        (
            "# Mutants",
            "",
            "The model is broken in one place at a time; the tests run until three have failed. Written by `python tests/tools/mutants.py`.",
            "",
            results.markdown_table(["mutant", "killed by (the first three)"], rows),
            "",
            f"Without a mutant: {control.strip('= ')}. Killed: {len(rows) - len(survivors)} of {len(rows)}.",
            "",
            results.markdown_table(["run", ""], facts),
            "",
        )
    )
    print(text)
    if arguments.output:
        results.write_text(arguments.output, text)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
