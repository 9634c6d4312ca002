"""The text of a run of `neobert pretrain` as batches: prepared or streamed, weighted, held out.

A run is a `Given` of pretrain.py.
"""

import sys

from ..common.errors import UserError
from .batches import MicroBatches, SpecialTokens, Windows
from .heldout import check_held_out
from .masking import TokenMasking
from .prepared import TokenisedTexts, describe, load_prepared, prepare
from .sources import load_rows, shares_of
from .streaming import StreamedBatches


def folder_of(name):
    """Folder in `prepared` of the held-out set `name`, "" for the only one."""
    return f"heldout-{name}" if name else "heldout"


def prepared_tokens(run, name, sources, tokenizer):
    """The tokenised form of `sources`, made first when it is not there, under `name` of
    `Given.sets`."""
    folder = run.prepared / name
    if len(sources) == 1 and sources[0].kind == "prepared":
        folder = sources[0].name
    else:
        with run.training.main_process_first(desc="tokenising"):
            prepare(sources, folder, tokenizer)
    tokens, summary = load_prepared(folder, tokenizer)
    if run.training.process_index == 0:
        print(f"{summary['dataset']}: {describe(summary)}", file=sys.stderr, flush=True)
    return tokens


def training_tokens(run, tokenizer):
    """`TokenisedTexts` of the training text."""
    sets = {name: sources for name, sources in run.sets.items() if name.startswith("train")}
    tokens = [prepared_tokens(run, name, sources, tokenizer) for name, sources in sets.items()]
    shares = shares_of(run.data.sources)
    return TokenisedTexts.joined(tokens, shares) if shares else tokens[0]


def check_text(run):
    """Opens the text that is not prepared yet, so that what is not there, a column or a row as
    well, is named before a model is loaded. UserError for held-out text that is trained on."""
    check_held_out(run.data.heldout_sources, run.data.sources)
    for name, sources in run.sets.items():
        is_there = (run.prepared / name / "prepared.json").is_file()
        if sources[0].kind != "prepared" and not is_there:
            if next(iter(load_rows(sources)), None) is None:
                raise UserError(f"dataset {sources[0].name} has no rows")


def heldout_batches(run, tokenizer):
    """{name: `MicroBatches`} of the held-out sets, masked alike over the run."""
    return {name: heldout_set(run, name, tokenizer) for name in run.data.heldout_sources}


def heldout_set(run, name, tokenizer, prefix=""):
    """`MicroBatches` of one held-out set; `prefix` of its folder in `prepared`."""
    spec, batch = run.spec.of_all_texts(run.spec.seed + 1), run.batch
    sources, folder = run.data.heldout_sources[name], prefix + folder_of(name)
    tokens = prepared_tokens(run, folder, sources, tokenizer)
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking = TokenMasking(tokenizer, *shares)
    return make_batches(tokens, tokenizer, masking, spec, name or run.data.heldout)


def training_batches(run, tokenizer, masking):
    """(`TokenisedTexts`, `MicroBatches`) of the training text; of text that is streamed (None,
    `StreamedBatches` of this process)."""
    if run.streams:
        return None, make_stream(run, tokenizer, masking)
    tokens = training_tokens(run, tokenizer)
    return tokens, make_batches(
        tokens, tokenizer, masking, run.spec, run.data.dataset, run.micro_batches
    )


def make_stream(run, tokenizer, masking):
    """`StreamedBatches` of this process."""
    training, shares = run.training, shares_of(run.data.sources)
    parts = [[source] for source in run.data.sources] if shares else [run.data.sources]
    rows = [load_rows(part) for part in parts]
    return StreamedBatches(
        rows,
        shares,
        tokenizer,
        masking,
        run.spec,
        run.micro_batches,
        training.process_index,
        training.world_size,
        training.dataloader_num_workers,
    )


def make_batches(tokens, tokenizer, masking, spec, name, count=None):
    """`MicroBatches` of a tokenised set; `count=None`: one pass. UserError if its text has nothing
    to mask."""
    batches = MicroBatches(Windows(tokens, SpecialTokens.of(tokenizer), spec), masking, spec, count)
    looked = len(batches) if count is None else min(count, 100)
    if not any((batches[i]["labels"] != -100).any() for i in range(looked)):
        raise UserError(
            f"the text of {name} has no token to mask, only special ones such as [UNK]; is the "
            "tokenizer made for it?"
        )
    return batches
