"""`neobert mteb`: MTEB through the `mteb` package, packed and resumable, and its table in the
layout of the paper's Table 4."""

import hashlib
import json
from pathlib import Path

import mteb
import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.types import PromptType

from ..common.constants import DTYPES
from ..common.errors import UserError, one_line
from ..common.files import write_json
from ..common.folders import check_folder
from ..common.identity import model_digest
from ..common.loading import choose_device
from ..common.results import check_result_files, environment
from .instructions import read_instructions as read_file
from .mteb_tables import averages, read_run, read_runs, task_table, write_tables
from .options import OPTIONS
from .packed_encoder import PackedEncoder


# Both texts of these tasks are alike, so both carry the instruction; elsewhere the query alone
# does.
_INSTRUCTED_SIDES = (None, PromptType.query)


# {name: class} of tasks beside MTEB's own, which are "local" together: benchmarks/local_tasks.py.
LOCAL_TASKS = {}


def choose_tasks(names):
    """MTEB task objects for names of tasks and benchmarks; commas separate names too.

    Raises:
        UserError: a name that MTEB does not know, with the nearest one.
    """
    import difflib

    benchmarks = {benchmark.name for benchmark in mteb.get_benchmarks()}
    tasks = {}
    for name in names:
        if name in benchmarks or name in LOCAL_TASKS:
            parts = [name]
        else:
            parts = [part.strip() for part in name.split(",") if part.strip()]
        for part in parts:
            if part in benchmarks:
                found = list(mteb.get_benchmark(part).tasks)
            elif part == "local" and LOCAL_TASKS:
                found = [task() for task in LOCAL_TASKS.values()]
            elif part in LOCAL_TASKS:
                found = [LOCAL_TASKS[part]()]
            else:
                try:
                    found = [mteb.get_task(part, languages=["eng"])]
                except (KeyError, ValueError):
                    known = [
                        *benchmarks,
                        *LOCAL_TASKS,
                        *(task.metadata.name for task in mteb.get_tasks(languages=["eng"])),
                    ]
                    near = difflib.get_close_matches(part, known, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise UserError(f"MTEB has no task or benchmark {part!r}{hint}") from None
            tasks.update({task.metadata.name: task for task in found})
    return list(tasks.values())


def read_instructions(choice, tasks):
    """{task name or task type: text} from a file, {} for "mteb", None for "none".

    Raises:
        UserError: not such a file, or a name that is neither a chosen task (or a part of one) nor
            its type.
    """
    if choice in ("mteb", "none"):
        return {} if choice == "mteb" else None
    parts = [part for task in tasks for part in (task, *getattr(task, "tasks", ()))]
    return read_file(
        choice, {name for part in parts for name in (part.metadata.name, part.metadata.type)}
    )


class PackedModel(AbsEncoder):
    """A `PackedEncoder` as MTEB calls models.

    Args:
        encoder: `PackedEncoder`.
        name, revision: under which MTEB caches results; the revision must change with anything that
            changes the vectors.
        instructions: {task name or type: text} that go before MTEB's own, or None for no
            instruction at all.
        template: how an instruction is put before a text.
    """

    prompt_priority = (
        PromptSource.CUSTOM_PROMPT,
        PromptSource.TASK_TYPE_PROMPT,
        PromptSource.DEFAULT_TASK_PROMPT,
    )

    def __init__(self, encoder, name, revision, instructions, template):
        self.encoder = encoder
        self.model = encoder.sentence_transformer
        self.prompts_dict = instructions
        self.instruction_template = template
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def prompt(self, task_metadata, prompt_type):
        """The text before each text of this task and side."""
        if self.prompts_dict is None or prompt_type not in _INSTRUCTED_SIDES:
            return ""
        return self.get_task_instruction(task_metadata, prompt_type)

    def encode(self, inputs, *, task_metadata, hf_split, hf_subset, prompt_type=None, **kwargs):
        """(N, width) float32 vectors of all texts of the loader, batched anew by tokens."""
        texts = [text for batch in inputs for text in batch["text"]]
        show = kwargs.get("show_progress_bar", True)
        return self.encoder.encode(
            texts, self.prompt(task_metadata, prompt_type), show_progress_bar=show
        )


def fingerprint(encoder, arguments, instructions):
    """40 hex digits that change with the model's files and with every setting that changes
    vectors."""
    settings = [
        model_digest(arguments.model),
        arguments.tokenizer,
        str(encoder.dtype),
        encoder.max_length,
        encoder.prompts,
    ]
    settings += [arguments.pooling, instructions, arguments.instruction_template]
    return hashlib.sha1(json.dumps(settings).encode()).hexdigest()


def _check_output(arguments):
    """Raises UserError when the output is no folder, or has files that the command would replace
    and did not write."""
    folder, name = arguments.output, f"{arguments.row}.json"
    check_folder(folder, "output")
    check_result_files(folder, "mteb", read_run(Path(folder) / name), name)
    check_result_files(folder, "mteb", read_runs(folder), "table.md")


def _earlier(folder, name, revision):
    """The result that `folder` holds under this name, {} where there is none.

    Raises:
        UserError: it belongs to other weights or settings.
    """
    run = read_run(folder / f"{name}.json") or {}
    if run and run.get("fingerprint") != revision:
        raise UserError(
            f"{folder / name}.json holds the scores of other weights or settings "
            f"({run.get('model')}); give this model another --name, "
            "or choose another --output"
        )
    return run


def _remove_broken_results(cache, model):
    """Deletes what a killed run left half-written in MTEB's cache, which its reader would stop
    at."""
    meta = model.mteb_model_meta
    folder = cache.get_task_result_path(
        task_name="x", model_name=meta, model_revision=meta.revision
    ).parent
    for path in folder.glob("*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            path.unlink()


def evaluate(encoder, arguments, show_progress_bar=True):
    """Runs the tasks; finished ones are taken from MTEB's result cache in `output`/cache.

    Args:
        encoder: `PackedEncoder`.
        arguments: `MtebArguments`.
    Returns:
        dict with scores in percent, types, averages, errors, and the environment; also written to
        `output`/<name>.json, beside the scores of other tasks that it holds already.
    """
    tasks = choose_tasks(arguments.tasks)
    texts = read_instructions(arguments.instructions, tasks)
    name, folder = arguments.row, Path(arguments.output)
    _check_output(arguments)
    revision = fingerprint(encoder, arguments, texts)
    earlier = _earlier(folder, name, revision)
    model = PackedModel(encoder, f"neobert/{name}", revision, texts, arguments.instruction_template)
    cache = mteb.ResultCache(cache_path=folder / "cache")
    _remove_broken_results(cache, model)
    results = mteb.evaluate(
        model,
        tasks,
        cache=cache,
        co2_tracker=False,
        raise_error=False,
        show_progress_bar=show_progress_bar,
        encode_kwargs={"batch_size": 1024, "show_progress_bar": show_progress_bar},
    )
    scores = earlier.get("scores", {}) | {task.metadata.name: None for task in tasks}
    metrics = earlier.get("metrics", {}) | {
        task.metadata.name: task.metadata.main_score for task in tasks
    }
    for result in results.task_results:
        score = result.get_score()
        scores[result.task_name] = (
            None if score is None or np.isnan(score) else round(100 * float(score), 4)
        )
    types = earlier.get("types", {}) | {task.metadata.name: task.metadata.type for task in tasks}
    report = {
        "name": name,
        "model": str(arguments.model),
        "fingerprint": revision,
        "scores": scores,
        "metrics": metrics,
        "types": types,
        "averages": averages(scores, types),
        "errors": {error.task_name: error.exception for error in results.exceptions or []},
        "instructions": arguments.instructions,
        "instruction_template": arguments.instruction_template,
        "dtype": arguments.dtype,
        "max_length": encoder.max_length,
        "environment": environment(dtype=encoder.dtype_name, device=str(encoder.device)),
    }
    write_json(folder / f"{name}.json", report)
    write_tables(folder)
    return report


def _earlier_dtype(arguments):
    """The dtype that an earlier run of this row chose by itself, so that a measurement that turns
    out otherwise does not part them."""
    try:
        run = read_run(Path(arguments.output) / f"{arguments.row}.json")
        return (
            run["environment"]["dtype"]
            if run["dtype"] == "auto" and run["environment"]["dtype"] in DTYPES
            else "auto"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "auto"


def main(argv=None):
    """`neobert mteb --model MODEL --output FOLDER`; returns the exit code."""
    (arguments,) = OPTIONS["mteb"].read(argv or [])
    _check_output(arguments)
    read_instructions(arguments.instructions, choose_tasks(arguments.tasks))
    dtype = _earlier_dtype(arguments) if arguments.dtype == "auto" else arguments.dtype
    encoder = PackedEncoder.from_arguments(arguments, choose_device(arguments.device), dtype)
    report = evaluate(encoder, arguments)
    print(task_table({report["name"]: report}))
    if report["errors"]:
        names = ", ".join(report["errors"])
        first = one_line(next(iter(report["errors"].values())))
        raise UserError(
            f"{len(report['errors'])} of {len(report['scores'])} tasks failed ({names}): {first}; "
            "run again to continue"
        )
    return 0
