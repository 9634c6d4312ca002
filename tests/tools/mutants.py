"""Breaks the model in one place at a time and shows that the tests notice: `python
tests/tools/mutants.py [--output results/mutants.md]`.

Every mutant is applied to a copy of the checkout in a temporary folder, where the model's tests run
until one has failed. The table says which. Exit status 1 if a mutant survives, or if the tests fail
without one.
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
            if module.bias is not None:
                nn.init.zeros_(module.bias)
"""
MODEL, ATTENTION, CONFIG = "modeling_neobert.py", "attention_neobert.py", "configuration_neobert.py"
SEQUENCES = "sequences[q] == sequences[k]"

# name: ((text in one of the model's two files, what replaces it), ...); test files to run, the
# likeliest first. A text of the configuration's
# file comes with that file's name as a third item.
MUTANTS = {
    # ------------------------------------------------------------------------------------------
    # blocks
    "SwiGLU halves swapped": ((("gate, value = self.w12", "value, gate = self.w12"),), CORE),
    "RMSNorm in bfloat16": (
        (("norm = NeoBERTRMSNorm if", "norm = _LowNorm if"), ("def _norm(config):\n", LOW_NORM)),
        ("model_api",),
    ),
    "RMSNorm in bfloat16, without gradients": (
        (("rows = at_least_float32(rows)\n            scale", "scale"),),
        ("settings",),
    ),
    "RMSNorm without its weight, without gradients": (
        (("(rows * scale).mul_(weight)", "rows * scale"),),
        ("packing",),
    ),
    "no residual around attention": (
        (("hidden = hidden + self.dropout(output)", "hidden = self.dropout(output)"),),
        CORE,
    ),
    "no dropout after attention": (
        (("hidden = hidden + self.dropout(output)", "hidden = hidden + output"),),
        ("settings",),
    ),
    "no dropout after the feed-forward": (
        (
            (
                "hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))",
                "hidden + self.ffn(self.ffn_norm(hidden))",
            ),
        ),
        ("settings",),
    ),
    "no dropout of the embedding": (
        (("return self.embedding_dropout(hidden), positions", "return hidden, positions"),),
        ("settings",),
    ),
    "attention dropout active in eval": (
        (
            (
                "dropout = self.config.attention_dropout if self.training else 0.0",
                "dropout = self.config.attention_dropout",
            ),
        ),
        ("model_api",),
    ),
    "attention dropout never active": (
        (("dropout = self.config.attention_dropout if self.training else 0.0", "dropout = 0.0"),),
        ("settings", "model_api"),
    ),
    "residual dropout active in eval": (
        (
            (
                "hidden = hidden + self.dropout(output)",
                "hidden = hidden + F.dropout(output, self.dropout.p)",
            ),
        ),
        ("model_api",),
    ),
    "head interleaving of qkv changed": (
        (
            (
                "unflatten(-1, (self.num_heads, 3, -1))",
                "unflatten(-1, (3, self.num_heads, -1)).transpose(-3, -2)",
            ),
        ),
        CORE,
    ),
    "a block always returns a tuple": (
        (
            ("return (hidden, weights) if output_attentions else hidden", "return hidden, weights"),
            (
                "            if output_attentions:\n                hidden, block_weights = "
                "hidden\n",
                "            hidden, block_weights = hidden\n            if output_attentions:\n",
            ),
        ),
        ("clients",),
    ),
    "checkpointing recomputes nothing": (
        (("class NeoBERTBlock(GradientCheckpointingLayer):", "class NeoBERTBlock(nn.Module):"),),
        ("compile_export",),
    ),
    "causal attention in what reads is_causal": (
        (("    is_causal = False\n", "    is_causal = True\n"),),
        ("attention",),
    ),
    "the feed-forward's slices flatten an adapted layer": (
        ((" and type(self.w12) is type(self.w3) is nn.Linear\n        if", "\n        if"),),
        ("packing",),
    ),
    "the feed-forward's slices reach hooks": (
        (("if not in_pieces or _hooks(self):", "if not in_pieces:"),),
        ("packing",),
    ),
    # ------------------------------------------------------------------------------------------
    # backbone
    "last hidden state taken before the norm": (
        (
            (
                "        hidden = self.layer_norm(hidden)\n",
                "        hidden = hidden * self.layer_norm.weight.new_ones(())\n",
            ),
        ),
        CORE,
    ),
    "last of hidden_states not normed": (
        (
            (
                "        hidden = self.layer_norm(hidden)\n        if output_hidden_states:\n     "
                "       states.append(hidden)\n        return hidden, states",
                "        if output_hidden_states:\n            states.append(hidden)\n        "
                "return self.layer_norm(hidden), states",
            ),
        ),
        CORE,
    ),
    "config.output_attentions ignored": (
        (
            (
                "            output_attentions = config.output_attentions\n",
                "            output_attentions = False\n",
            ),
        ),
        ("settings",),
    ),
    "position_ids ignored": (
        (
            (
                "position_ids = _check_positions(position_ids, given.shape[:2])",
                "position_ids = None",
            ),
        ),
        ("rope",),
    ),
    "learned positions one short": (
        (("rows = config.max_position_embeddings + 1", "rows = config.max_position_embeddings"),),
        ("settings",),
    ),
    "learned positions not shifted": (
        (("return position_ids + 1\n", "return position_ids\n"),),
        ("model_api", "settings"),
    ),
    "learned positions count padding": (
        (
            (
                "return real.cumsum(dim=-1) * real",
                "return torch.ones_like(real).cumsum(dim=-1) * real",
            ),
        ),
        ("model_api",),
    ),
    "padding counts as text for learned positions": (
        (("if dynamic or (not is_tracing() and longest > limit):", "if dynamic:"),),
        ("settings",),
    ),
    "dynamic RoPE depends on padding": (
        (("if dynamic or (not is_tracing() and longest > limit):", "if False:"),),
        ("rope",),
    ),
    "traced dynamic RoPE depends on padding": (
        (
            (
                "if dynamic or (not is_tracing() and longest > limit):",
                "if not is_tracing() and (dynamic or longest > limit):",
            ),
        ),
        ("compile_export",),
    ),
    "hooks see packed rows": ((("return bool(found)\n", "return False\n"),), ("clients",)),
    "any hook switches packing off": (
        (("for hook in found if not _is_machinery(hook)", "for hook in found"),),
        ("clients",),
    ),
    "unknown arguments vanish": (
        (("if unknown and not is_tracing():", "if False:"),),
        ("serving",),
    ),
    # ------------------------------------------------------------------------------------------
    # heads
    "parent-level initialisation": (((LEAF_INIT, PARENT_INIT),), ("loading",)),
    "in-place initialisation": (
        (
            (
                "            bound = self.config.decoder_init_range\n            "
                "nn.init.uniform_(module.weight, -bound, bound)",
                "            bound = self.config.decoder_init_range\n            "
                "module.weight.data.uniform_(-bound, bound)",
            ),
            (
                "            bound = self.config.embedding_init_range\n            "
                "nn.init.uniform_(module.weight, -bound, bound)",
                "            bound = self.config.embedding_init_range\n            "
                "module.weight.data.uniform_(-bound, bound)",
            ),
            ("nn.init.normal_(module.weight, mean=0.0,", "module.weight.data.normal_(mean=0.0,"),
        ),
        ("loading", "remote_code_rules"),
    ),
    "dense drawn anew in every process": (
        (('        if module is getattr(self, "dense", None):\n', "        if False:\n"),),
        ("clients",),
    ),
    "dense drawn over a loaded one": (
        (('not getattr(weight, "_is_hf_initialized", False)', "True"),),
        ("clients", "loading"),
    ),
    "dense drawn without its range": (
        (("weight.copy_(std * torch.randn", "weight.copy_(torch.randn"),),
        ("clients",),
    ),
    "no dropout before dense": (
        (("self.dense(self.dropout(pooled))", "self.dense(pooled)"),),
        ("settings",),
    ),
    "no dropout before the classifier": (
        (
            (
                "self.classifier(self.dropout(torch.tanh(",
                "self.classifier((lambda x: x)(torch.tanh(",
            ),
        ),
        ("settings",),
    ),
    "no dropout of the token head": (
        (
            (
                "self.classifier(self.dropout(outputs.last_hidden_state))",
                "self.classifier(outputs.last_hidden_state)",
            ),
        ),
        ("settings",),
    ),
    "multiple choice ignores position_ids": (
        (
            (
                'given["attention_mask"] = attention_mask\n',
                'given |= {"attention_mask": attention_mask, "position_ids": None}\n',
            ),
        ),
        ("settings",),
    ),
    "a head drops hidden_states": (
        (
            (
                'states = {"hidden_states": outputs.hidden_states, "attentions": '
                "outputs.attentions}\n        return self.output_class",
                'states = {"attentions": outputs.attentions}\n        return self.output_class',
            ),
        ),
        ("settings",),
    ),
    "a head drops attentions": (
        (('"attentions": outputs.attentions}', '"attentions": None}'),),
        ("settings",),
    ),
    "problem_type not written": (
        (
            (
                "problem = self.config.problem_type\n",
                "problem, self.config.problem_type = self.config.problem_type, None\n",
            ),
        ),
        ("clients",),
    ),
    "one column of classes is several labels": (
        (("labels.dim() == 1 or labels.shape[1:] == (1,)\n", "labels.dim() == 1\n"),),
        ("clients", "serving"),
    ),
    "flat labels refused": ((("labels.numel() == shape.numel():", "False:"),), ("serving",)),
    "labels at padding count": (
        (
            (
                "labels = given if dense else given.masked_fill(attention_mask == 0, -100)",
                "labels = given",
            ),
        ),
        ("serving",),
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
    "num_items_in_batch ignored": (
        (("    if num_items_in_batch is None:\n", "    if True:\n"),),
        ("heads",),
    ),
    "mean pooling over padding": (
        (
            ("(hidden * mask[..., None]).sum(dim=1,", "hidden.sum(dim=1,"),
            (
                "/ mask.sum(dim=-1, keepdim=True)",
                "/ torch.ones_like(mask).sum(dim=-1, keepdim=True)",
            ),
        ),
        ("heads",),
    ),
    "packed means in the order of their lengths": (
        (("index_copy(0, self.rows, x)", "index_copy(0, self.rows.sort().values, x)"),),
        ("heads",),
    ),
    "an answer may be padding": (
        (("attention_mask[..., None] == 0, _NO", "attention_mask[..., None] < 0, _NO"),),
        ("heads",),
    ),
    "an answer may be padding where packed": (
        (("outputs.packing.unpack(logits, _NO_ANSWER)", "outputs.packing.unpack(logits)"),),
        ("heads",),
    ),
    "first column pooled in place of the first real token": (
        (
            (
                "firsts = mask.to(torch.int32).argmax(dim=-1)",
                "firsts = mask.to(torch.int32).argmax(dim=-1) * 0",
            ),
        ),
        ("heads",),
    ),
    # ------------------------------------------------------------------------------------------
    # RoPE
    "no RoPE": ((('    if config.position_embedding_type != "rope":\n', "    if True:\n"),), CORE),
    "RoPE angles in bfloat16": (
        (
            (
                "angles = (positions[..., None].float() * frequencies.float())",
                "angles = (positions[..., None].bfloat16() * frequencies.bfloat16()).float()",
            ),
        ),
        ("rope",),
    ),
    "RoPE rotates halves in place of adjacent pairs": (
        (
            (
                "pairs = torch.view_as_complex(at_least_float32(x).unflatten(-1, (-1, 2)))",
                "pairs = torch.view_as_complex(at_least_float32(x).unflatten(-1, (2, "
                "-1)).transpose(-1, -2).contiguous())",
            ),
        ),
        CORE,
    ),
    "RoPE in place lost in low precision": (
        (("rows.copy_(pairs.flatten(-2))", "pass"),),
        ("rope",),
    ),
    "RoPE in place under hooks": (
        (("in_place = in_place and not _hooks(self.qkv)\n", "pass\n"),),
        ("packing",),
    ),
    "the attention factor of YaRN ignored": (
        (
            (
                "angles.cos() * attention_factor, angles.sin() * attention_factor",
                "angles.cos(), angles.sin()",
            ),
        ),
        ("rope",),
    ),
    # -------------------------------------------------------------------------------------
    # and attention
    "sdpa ignores the padding mask": (
        (
            (
                " and (packing is not None or mask is not None):\n",
                ' and (packing is not None or (mask is not None and implementation != "sdpa")):\n',
            ),
        ),
        CORE,
    ),
    "every implementation ignores the padding mask": (
        (("    return mask.to(torch.bool)\n\n", "    return None\n\n"),),
        CORE,
    ),
    "a row of padding sees nothing": (
        (("mask | ~mask.any(dim=-1, keepdim=True)", "mask"),),
        ("attention",),
    ),
    "eager scale x1.5": (
        (("key.transpose(-1, -2) * scaling", "key.transpose(-1, -2) * scaling * 1.5"),),
        CORE,
    ),
    "causal eager attention": (
        (
            (
                "    weights = scores.softmax(dim=-1",
                "    scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), "
                "-1e9)\n    weights = scores.softmax(dim=-1",
            ),
        ),
        CORE,
    ),
    "packed texts see each other: eager, sdpa": (
        (
            (
                "for length, group in groupby(packing.lengths)]",
                "for length, group in groupby([sum(packing.lengths)])]",
            ),
        ),
        ("attention",),
    ),
    "packed texts see each other: flex": (
        (
            (
                "real[b, k] if sequences is None else " + SEQUENCES,
                "real[b, k] if sequences is None else sequences[q] >= sequences[k] * 0",
            ),
        ),
        ("attention",),
    ),
    "packed texts see each other: user functions, compiled": (
        (
            (
                "(sequences[:, None] == sequences)[None, None]",
                "(sequences[:, None] >= sequences * 0)[None, None]",
            ),
        ),
        ("attention",),
    ),
    "packing arguments ignored": (
        (
            (
                "bounds, other, longest = (kwargs.get(name) for name in PACKING_KWARGS[:3])",
                "bounds, other, longest = None, None, None",
            ),
        ),
        ("attention",),
    ),
    "restarting positions are not packing": (
        (("return packing if len(packing.lengths) > 1 else None", "return None"),),
        ("attention",),
    ),
    "compiled texts that start again see each other": (
        (
            (
                "starts, tokens[:-1] == 0)\n        # Not",
                "tokens[:-1] == 0, tokens[:-1] == 0)\n        # Not",
            ),
        ),
        ("compile_export",),
    ),
    "a symbolic length becomes a constant": (
        (
            (
                "torch.where(F.pad(starts, (0, 1), value=True), tokens, tokens[-1]).sort().values",
                "F.pad(torch.where(starts, tokens[:-1], total).sort().values, (0, 1), value=total)",
            ),
        ),
        ("serving",),
    ),
    "the output of an engine is not reshaped": (
        (("self.wo(output.reshape(hidden.shape))", "self.wo(output.flatten(-2))"),),
        ("serving",),
    ),
    "a mask is built for an engine": (
        (('    if implementation in _ENGINES:\n        return "engine", None\n', ""),),
        ("serving",),
    ),
    "a registered mask function is not called": (
        (('    if convention == "own":\n', "    if False:\n"),),
        ("serving",),
    ),
    "additive masks in float32": (
        (
            (
                "torch.zeros_like(self.mask, dtype=hidden.dtype)",
                "torch.zeros_like(self.mask, dtype=torch.float32)",
            ),
        ),
        ("attention",),
    ),
    "a 4-D mask is read as padding": (
        (("    if mask is not None and mask.dim() == 4:\n        return mask\n", ""),),
        ("serving",),
    ),
    "dropout lost by the re-padded kernel": (
        (
            (
                "output, _ = function(module, q, k, v, mask[:, None, None], **kwargs)",
                "output, _ = function(module, q, k, v, mask[:, None, None], "
                "scaling=kwargs.get('scaling'))",
            ),
        ),
        ("serving",),
    ),
    "torch's kernel runs with dropout": (
        (("    if training and config.attention_dropout > 0:\n", "    if False:\n"),),
        ("serving", "attention"),
    ),
    "torch's kernel runs on a T4": ((("    if major >= 8:\n", "    if True:\n"),), ("attention",)),
    "a wait for the device a layer": (
        (
            (
                "        return _varlen(query, key, value, **kwargs)\n",
                "        return _varlen(query, key, value, **kwargs, "
                "more=self.packing.cu_seq_lens.tolist())\n",
            ),
        ),
        ("serving",),
    ),
    "labels are looked at on a GPU": (
        (
            (
                "    if classes is not None and values_are_free(labels):",
                "    if classes is not None:",
            ),
        ),
        ("serving",),
    ),
    # ------------------------------------------------------------------------------------------
    # corners
    "rows of other strides are not written": (
        (("torch.empty_like(x, memory_format=torch.contiguous_format)", "torch.empty_like(x)"),),
        ("corners",),
    ),
    "a fixed epsilon": (
        (("norm(config.hidden_size, eps=config.norm_eps)", "norm(config.hidden_size, eps=1e-5)"),),
        ("corners",),
    ),
    "eager softmax in bfloat16": (
        (("scores.softmax(dim=-1, dtype=torch.float32).type_as(query)", "scores.softmax(dim=-1)"),),
        ("corners",),
    ),
    "rows of padding are pooled to ones": (
        (("x.new_zeros(self.shape[0]", "x.new_ones(self.shape[0]"),),
        ("corners",),
    ),
    "the longest of restarting positions is the row": (
        (
            (
                "        packing.max_length = max(packing.lengths)\n        return packing if",
                "        return packing if",
            ),
        ),
        ("corners",),
    ),
    "the mean of a row of padding divides by zero": (
        (("mask.sum(dim=-1, keepdim=True).clamp(min=1))", "mask.sum(dim=-1, keepdim=True))"),),
        ("corners",),
    ),
    "other modules are not initialised": (
        (
            (
                "            super()._init_weights(module)\n\n    def save_pre",
                "            pass\n\n    def save_pre",
            ),
        ),
        ("corners",),
    ),
    "all zeros are texts of one token": (((".all() & positions.any()", ".all()"),), ("corners",)),
    "values of fake tensors are read": (
        (("return not isinstance(x, FakeTensor) and not torch", "return not torch"),),
        ("corners",),
    ),
    "rows are written under torch.func": (
        ((" and torch._C._functorch.peek_interpreter_stack() is None", ""),),
        ("corners",),
    ),
    "a mask of one row for all is refused": (
        (("    if mask.shape == (1, length):\n", "    if False:\n"),),
        ("corners",),
    ),
    "the logit of padding is the lowest number": (
        (("_NO_ANSWER = -8192.0", "_NO_ANSWER = torch.finfo(torch.float32).min"),),
        ("corners",),
    ),
    "the padding position learns": (
        (("nn.Embedding(rows, width, padding_idx=0)", "nn.Embedding(rows, width)"),),
        ("corners",),
    ),
    "embeddings are compared with the padding token": (
        (
            ("elif input_ids is not None and self.config.pad", "elif self.config.pad"),
            ("real = input_ids != self", "real = given != self"),
        ),
        ("corners",),
    ),
    "learned positions need a padding token": (
        ((" and self.config.pad_token_id is not None:\n            real", ":\n            real"),),
        ("corners",),
    ),
    "learned positions count a 4-D mask": (
        (
            (
                "if attention_mask is not None and attention_mask.dim() == 2:\n            real =",
                "if attention_mask is not None:\n            real =",
            ),
        ),
        ("corners",),
    ),
    "heads pool by a 4-D mask": (
        (
            (
                "if attention_mask is None or attention_mask.dim() != 2:\n            return "
                "hidden.mean",
                "if attention_mask is None:\n            return hidden.mean",
            ),
        ),
        ("corners",),
    ),
    "answers are masked by a 4-D mask": (
        (
            (
                "elif attention_mask is not None and attention_mask.dim() == 2:",
                "elif attention_mask is not None:",
            ),
        ),
        ("corners",),
    ),
    "labels are masked by a 4-D mask": (
        (
            (
                "dense = attention_mask is None or attention_mask.dim() != 2",
                "dense = attention_mask is None",
            ),
        ),
        ("corners",),
    ),
    "one 4-D mask for all rows is refused": (
        (("mask.shape[0] in (1, batch)", "mask.shape[0] == batch"),),
        ("corners",),
    ),
    "additive masks are inverted": (
        (("self.mask is not None and self.mask.dtype == torch.bool:", "self.mask is not None:"),),
        ("corners",),
    ),
    "labels of int32": ((("labels.flatten().long()", "labels.flatten()"),), ("corners",)),
    "labels of bool": (
        (
            (
                "if labels.is_floating_point() or labels.dtype == torch.bool:",
                "if labels.is_floating_point():",
            ),
        ),
        ("corners",),
    ),
    "negative multi-label labels": (
        (("((labels < 0) | (labels > 1)).any()", "(labels > 1).any()"),),
        ("corners",),
    ),
    "heads return tuples to themselves": (
        (
            (
                'kwargs |= {"return_dict": True, "keep_packed": True}',
                'kwargs |= {"keep_packed": True}',
            ),
        ),
        ("corners",),
    ),
    "logits of labels' shape under torch.compile": (
        (
            (
                "if not self.config.sparse_prediction or is_tracing():",
                "if not self.config.sparse_prediction:",
            ),
        ),
        ("corners",),
    ),
    "blocks may be split": (
        (('_no_split_modules = ["NeoBERTBlock"]', "_no_split_modules = []"),),
        ("corners",),
    ),
    "ids of a larger embedding are refused": (
        (("given, weight.shape[0], ", "given, self.config.vocab_size, "),),
        ("corners",),
    ),
    "positions of bool": (
        (
            (
                "if position_ids.is_floating_point() or position_ids.dtype == torch.bool:",
                "if position_ids.is_floating_point():",
            ),
        ),
        ("corners",),
    ),
    "positions of other rows": (
        (
            (
                "position_ids.shape not in ((1, shape[1]), shape):",
                "position_ids.shape[-1] != shape[1]:",
            ),
        ),
        ("corners",),
    ),
    "dynamic RoPE waits for the meta device": (
        (
            (
                "if is_tracing() or (torch.is_tensor(longest) and not has_values(longest)):",
                "if is_tracing():",
            ),
        ),
        ("corners",),
    ),
    "a hook without a module": (
        (('(getattr(hook, "__module__", None) or "")', 'getattr(hook, "__module__")'),),
        ("corners",),
    ),
    "head_dim 256 does not run torch's kernel": (
        (("config.head_dim > 256", "config.head_dim >= 256"),),
        ("corners",),
    ),
    "mask functions may leave the mask out": (
        (('"allow_is_bidirectional_skip": False', '"allow_is_bidirectional_skip": True'),),
        ("corners",),
    ),
    # -----------------------------------------------------------------------------------------
    # configuration
    "default context of 512": (
        (('"max_position_embeddings": 4096,', '"max_position_embeddings": 512,', CONFIG),),
        ("settings",),
    ),
    "default classifier_dropout of 0": (
        (("classifier_dropout=0.1,", "classifier_dropout=0.0,", CONFIG),),
        ("settings",),
    ),
    "default classifier_init_range of 0.01": (
        (("classifier_init_range=0.02,", "classifier_init_range=0.01,", CONFIG),),
        ("settings",),
    ),
    "theta resets the scaling": (
        (
            (
                'self.rope_parameters = {**self.rope_parameters, "rope_theta": value}',
                'self.rope_parameters = {"rope_theta": value}',
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "max_length wins over max_position_embeddings": (
        (
            (
                "value if fields[name] is None else fields[name]",
                'value if fields[name] is None or (alias == "max_length" and value) else '
                "fields[name]",
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "rms_norm wins over norm_type": (
        (
            (
                "value if fields[name] is None else fields[name]",
                'value if fields[name] is None or (alias == "rms_norm" and value) else '
                "fields[name]",
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "dropout wins over attention_dropout": (
        (
            (
                "value if fields[name] is None else fields[name]",
                'value if fields[name] is None or (alias == "dropout" and value) else fields[name]',
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "rope_scaling wins over rope_parameters": (
        (
            (
                "for parameters in (rope_scaling, rope_parameters):",
                "for parameters in (rope_parameters, rope_scaling):",
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "SwiGLU width rounded down": ((("+ 7) // 8)", ") // 8)", CONFIG),), ("settings",)),
    "a RoPE factor below 1": (
        (("not 1 <= factor <=", "not 0 < factor <=", CONFIG),),
        ("settings",),
    ),
    "a RoPE factor of 1 refused": (
        (("not 1 <= factor <=", "not 1 < factor <=", CONFIG),),
        ("settings",),
    ),
    "dynamic RoPE of head_dim 2": (
        (('== "dynamic" and self.head_dim == 2:', '== "dynamic" and False:', CONFIG),),
        ("model_api",),
    ),
    "no architecture ends in ForMaskedLM": (
        (('["NeoBERTLMHead", "NeoBERTForMaskedLM"]', '["NeoBERTLMHead"]', CONFIG),),
        ("clients",),
    ),
    "YaRN of a length of True": (
        (("elif isinstance(trained, bool) or not isinstance", "elif not isinstance", CONFIG),),
        ("model_api",),
    ),
    "YaRN of a length of 0": (
        (
            (
                "not isinstance(trained, int) or trained < 1",
                "not isinstance(trained, int) or trained < 0",
                CONFIG,
            ),
        ),
        ("model_api",),
    ),
    "YaRN of equal betas": ((("fast > slow > 0", "fast >= slow > 0", CONFIG),), ("model_api",)),
    "YaRN of a beta of 0": ((("fast > slow > 0", "fast > slow", CONFIG),), ("model_api",)),
    "classifier_dropout is not checked": (
        (('"hidden_dropout", "classifier_dropout"):', '"hidden_dropout"):', CONFIG),),
        ("model_api",),
    ),
    "a padding id of True": (
        (
            (
                "isinstance(pad, bool) or not isinstance(pad, int)",
                "not isinstance(pad, int)",
                CONFIG,
            ),
        ),
        ("model_api",),
    ),
    "a theta of 0 in a dictionary": (
        (("self.rope_theta if theta is None else theta", "theta or self.rope_theta", CONFIG),),
        ("model_api",),
    ),
    "BERT's hidden_dropout_prob is ignored": (
        (("fields[own] = kwargs.pop(name, fields[own])", "kwargs.pop(name, None)", CONFIG),),
        ("corners",),
    ),
    "comparison with what is not a configuration": (
        (("isinstance(other, PretrainedConfig) and self.to_dict()", "self.to_dict()", CONFIG),),
        ("corners",),
    ),
    "a user's own class goes from the auto_map": (
        (('given = output.get("auto_map") or {}', "given = {}", CONFIG),),
        ("loading",),
    ),
    "a subclass is saved without its code": (
        (("custom_object_save(NeoBERTPreTrainedModel, save_directory)", "pass"),),
        ("loading",),
    ),
    "sparse logits in packed order": (
        (("rows = rows[packing.index[rows].argsort()]", "pass"),),
        ("heads",),
    ),
    "labels at padding dilute Trainer's loss": (
        (("if num_items_in_batch is None or labels is given:", "if True:"),),
        ("heads",),
    ),
    "patched forwards see packed rows": (
        (
            (
                '("forward", "_hf_hook", "_compiled_call_impl")',
                '("_hf_hook", "_compiled_call_impl")',
            ),
        ),
        ("clients",),
    ),
    "replaced blocks see packed rows": (
        (("for block in blocks if type(block) is not NeoBERTBlock", "for block in ()"),),
        ("clients",),
    ),
    "recorded queries and keys are rotated": (
        (
            (
                " and type(self.qkv) is nn.Linear\n            in_place = in_place and not "
                "_hooks(self.qkv)\n",
                "\n",
            ),
        ),
        ("corners",),
    ),
    "a row of padding is pooled in dense batches": (
        ((".masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)", ""),),
        ("corners",),
    ),
    # ---------------------------------------------------------------------------
    # once
    "the caller's packing goes under a hook": (
        (
            (
                '            kwargs["unpad_inputs"] = False\n',
                '            kwargs["unpad_inputs"] = kwargs["keep_packed"] = False\n',
            ),
        ),
        ("clients",),
    ),
    "hidden states with gradients are packed": (
        (("and not needs_states and", "and"),),
        ("clients",),
    ),
    "the encoder is the embedding": (
        (
            (
                "self.base_model_prefix, self).transformer_encoder\n\n    def attention_backend",
                "self.base_model_prefix, self).encoder\n\n    def attention_backend",
            ),
        ),
        ("clients",),
    ),
    "the function of the library is not called in the block": (
        (
            (
                "output, weights = attention_interface(",
                "output, weights = attention.around(attention_interface)(",
            ),
            ("        attention_interface = attention.around(attention_interface)\n", ""),
        ),
        ("serving",),
    ),
    "all hooks of transformers are machinery": (
        (('"transformers.integrations.tensor_parallel")', '"transformers.")'),),
        ("clients",),
    ),
    "traced dynamic RoPE takes the packed row for a text": (
        (("return packing.cu_seq_lens.diff().max()", "return packing.max_length"),),
        ("rope",),
    ),
    "max_length_q is taken for the longest text": (
        (("elif longest is None or values_are_free(bounds):", "elif longest is None:"),),
        ("rope",),
    ),
    "regression and multi-label loss in low precision": (
        (("logits = at_least_float32(logits).view_as(labels)", "logits = logits.view_as(labels)"),),
        ("heads",),
    ),
    "sparse logits of a packed batch need an index": (
        (("if packing is not None and packing.index is not None:", "if packing is not None:"),),
        ("heads",),
    ),
    "labels of exchanged axes are reshaped": (
        (("if labels.dim() != len(shape) and labels.numel()", "if labels.numel()"),),
        ("heads",),
    ),
    "another draw of dense": ((("manual_seed(0)", "manual_seed(1)"),), ("clients",)),
    "a tensor is the longest length of a traced batch": (
        (("packing.traced or torch.is_tensor(packing.max_length)", "packing.traced"),),
        ("serving",),
    ),
    "a number of items of zero divides": (
        (("max(num_items_in_batch, 1)", "num_items_in_batch"),),
        ("heads",),
    ),
    "a tensor of zero items divides": (
        (
            (
                "num_items_in_batch.to(total.device).clamp(min=1)",
                "num_items_in_batch.to(total.device)",
            ),
        ),
        ("heads",),
    ),
    "a new folder has no new parent": (
        (("mkdir(parents=True, exist_ok=True)", "mkdir(exist_ok=True)"),),
        ("loading",),
    ),
    "every process writes the code": (
        (("if is_main_process and not Path", "if not Path"),),
        ("loading",),
    ),
    "unknown decoder tensors go unseen": (
        (
            ("        self._keys_to_ignore_on_load_unexpected = None\n", ""),
            ("    _keys_to_ignore_on_load_unexpected = None\n", ""),
        ),
        ("loading",),
    ),
    "a 4-D mask of another batch size": ((("mask.shape[0] in (1, batch) and", ""),), ("serving",)),
    "YaRN makes the context shorter": (
        (
            (
                'return max(length, int(trained * rope.get("factor", 1)))',
                'return int(trained * rope.get("factor", 1))',
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "architectures grow": ((("list(dict.fromkeys(names))", "names", CONFIG),), ("loading",)),
    "theta in the view of the scaling": (
        ((' if name != "rope_theta"}', "}", CONFIG),),
        ("settings",),
    ),
    "type stays beside rope_type": (
        (('        parameters.pop("type", None)\n', "", CONFIG),),
        ("settings",),
    ),
    "type wins over rope_type": (
        (
            (
                'parameters.pop("rope_type", None) or parameters.get("type") or "default"',
                'parameters.get("type") or parameters.get("rope_type") or "default"\n        '
                'parameters.pop("rope_type", None)',
                CONFIG,
            ),
        ),
        ("settings",),
    ),
    "a max_length of 0 is none": (
        (("default if fields[name] is None else fields[name]", "fields[name] or default", CONFIG),),
        ("settings",),
    ),
    "a whole theta": (
        (('"rope_theta": float(theta)', '"rope_theta": float(int(theta))', CONFIG),),
        ("settings",),
    ),
}


def copy_checkout(folder):
    """The package and its tests as `folder`/neobert."""
    ignore = shutil.ignore_patterns(
        ".*",
        "__pycache__",
        "results",
        "runs",
        "demo",
        "examples",
        "build",
        "dist",
        "*.egg-info",
        "docs",
    )
    shutil.copytree(ROOT, folder / "neobert", ignore=ignore)
    return folder / "neobert"


def run_tests(checkout, names, maxfail):
    """Names of the tests that failed, and pytest's last line.

    The tests run in a fork of this process, which has imported torch and transformers but nothing
    of the package.
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
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "--tb=no",
            f"--maxfail={maxfail}",
        ]
        code = pytest.main([*options, *files])
        sys.stdout.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text()
    if status not in (0, 1, 2):
        raise SystemExit(f"pytest could not run: {output[-2000:]}")
    failed = re.findall(
        r"^(?:FAILED|ERROR) tests/test_(\S+?)\.py(?:::(\S+))?", output, flags=re.MULTILINE
    )
    lines = [line for line in output.splitlines() if line.strip()]
    return [f"{file}::{test}" if test else file for file, test in failed], lines[
        -1
    ] if lines else ""


def apply(sources, changes, name):
    """The model's files with a mutant's changes: {file: text}."""
    sources = dict(sources)
    for old, new, *file in changes:
        file = file[0] if file else MODEL if old in sources[MODEL] else ATTENTION
        if old not in sources[file]:
            raise SystemExit(
                f"Mutant {name!r}: no file contains {old!r}; the mutant must follow the code."
            )
        sources[file] = sources[file].replace(old, new)
    return sources


def write(checkout, sources):
    for file, text in sources.items():
        (checkout / file).write_text(text, encoding="utf-8")


def load_results_helpers():
    """common/results.py under another package's name: this process must not import the package,
    whose broken copies its forks import."""
    for name, folder in (("helpers", ROOT), ("helpers.common", ROOT / "common")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("helpers.common.results")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="markdown file to write")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: value for name, value in MUTANTS.items() if arguments.only in name}
    results = load_results_helpers()
    facts = results.environment()
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_checkout(Path(folder))
        originals = {
            file: (checkout / file).read_text(encoding="utf-8")
            for file in (MODEL, ATTENTION, CONFIG)
        }
        sources = {name: apply(originals, changes, name) for name, (changes, _) in chosen.items()}
        everything = [name for _, files in chosen.values() for name in files]
        failed, control = run_tests(checkout, everything, 3)
        if failed:
            raise SystemExit(f"The tests fail without a mutant: {', '.join(failed)}")
        rows, survivors = [], []
        for name, (_, files) in tqdm(chosen.items(), unit="mutant"):
            write(checkout, sources[name])
            failed, _ = run_tests(checkout, files, 1)
            rows.append([name, ", ".join(f"`{test}`" for test in failed) or "**survived**"])
            if not failed:
                survivors.append(name)
    facts = [[name, str(value)] for name, value in facts.items()]
    text = "\n".join(
        (
            "# Mutants",
            "",
            "The model is broken in one place at a time; the tests run until one has failed. "
            "Written by `python tests/tools/mutants.py`.",
            "",
            results.markdown_table(["mutant", "killed by"], rows),
            "",
            f"Without a mutant: {control.strip('= ')}. Killed: {len(rows) - len(survivors)} of "
            f"{len(rows)}.",
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
