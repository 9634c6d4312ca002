"""The text of a run of `neobert pretrain` as batches: prepared or streamed, weighted, held out.

A run is a `Given` of pretrain.py.
"""

import sys

from ..common.errors import UserError
from .batches import MicroBatches, SpecialTokens, Windows
from .heldout import check_held_out
from .masking import TokenMasking
from .prepared import TokenisedTexts, load_prepared, prepare
from .sources import load_rows, shares_of
from .streaming import StreamedBatches


def folder_of(name):
    """Folder in `prepared` of the held-out set `name`, "" for the only one."""
    return f"heldout-{name}" if name else "heldout"


def prepared_tokens(run, name, sources, tokenizer):
    """The tokenised form of `sources`, made first when it is not there, under `name` of
    `Given.sets`."""
    folder = run.prepared / name
    with run.training.main_process_first(desc="tokenising"):
        summary = prepare(sources, folder, tokenizer)
    if run.training.process_index == 0:
        print(
            f"{summary['dataset']}: {summary['kept']:,} of {summary['rows']:,} rows have text, "
            f"{summary['tokens']:,} tokens",
            file=sys.stderr,
        )
    return load_prepared(folder)


def check_text(run):
    """Opens the text that is not prepared yet, so that what is not there, a column or a row as
    well, is named before a model is loaded. UserError for held-out text that is trained on."""
    check_held_out(run.data.heldout_sources, run.data.sources)
    for name, sources in run.sets.items():
        is_there = (run.prepared / name / "prepared.json").is_file()
        if not is_there and next(iter(load_rows(sources)), None) is None:
            raise UserError(f"dataset {sources[0].name} has no rows")


def heldout_batches(run, tokenizer):
    """{name: `MicroBatches`} of the held-out sets, masked alike over the run."""
    spec, batch = run.spec.of_all_texts(run.spec.seed + 1), run.batch
    shares = (batch.mlm_probability, batch.mask_replace_prob, batch.random_replace_prob)
    masking, sets = TokenMasking(tokenizer, *shares), {}
    for name, sources in run.data.heldout_sources.items():
        tokens = prepared_tokens(run, folder_of(name), sources, tokenizer)
        sets[name] = make_batches(tokens, tokenizer, masking, spec, name or run.data.heldout)
    return sets


def training_batches(run, tokenizer, masking):
    """`MicroBatches` of the training text; of text that is streamed `StreamedBatches` of this
    process."""
    sources, training, shares = run.data.sources, run.training, shares_of(run.data.sources)
    if not run.streams:
        sets = {name: parts for name, parts in run.sets.items() if name.startswith("train")}
        tokens = [prepared_tokens(run, name, parts, tokenizer) for name, parts in sets.items()]
        tokens = TokenisedTexts.joined(tokens, shares) if shares else tokens[0]
        name = run.data.dataset
        return make_batches(tokens, tokenizer, masking, run.spec, name, run.micro_batches)
    rows = [load_rows([source]) for source in sources] if shares else [load_rows(sources)]
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
