"""`neobert mteb`: MTEB through the `mteb` package, packed and resumable, with tables of its
benchmarks."""

import hashlib
import json
import math
from pathlib import Path

import mteb
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.types import PromptType

from ..common.errors import UserError, one_line
from ..common.files import write_json
from ..common.folders import check_folder
from ..common.identity import model_digest
from ..common.loading import choose_device
from ..common.results import check_result_files, environment
from ..embeddings.instructions import read_instructions as read_file
from ..embeddings.packed_encoder import PackedEncoder
from .mteb_tables import read_run, read_runs, task_table, write_tables
from .options import BENCHMARKS, OPTIONS


# Both texts of these tasks are alike, so both carry the instruction; elsewhere the query alone
# does.
_INSTRUCTED_SIDES = (None, PromptType.query)


def choose_tasks(names, more=()):
    """MTEB's tasks for names of tasks and benchmarks.

    Args:
        more: {name: tasks} beside MTEB's own.
    Raises:
        UserError: a name that MTEB does not know.
    """
    benchmarks = {benchmark.name for benchmark in mteb.get_benchmarks()}
    tasks = {}
    for name in names:
        if name in more:
            found = more[name]
        elif name in benchmarks:
            found = mteb.get_benchmark(name).tasks
        else:
            try:
                found = [mteb.get_task(name, languages=["eng"])]
            except KeyError as error:
                raise UserError(
                    f"MTEB has no task or benchmark {name!r} ({error.args[0]}); benchmarks are "
                    f"{', '.join(BENCHMARKS)} and others"
                ) from None
        tasks |= {task.metadata.name: task for task in found}
    return list(tasks.values())


def read_instructions(choice, tasks):
    """{task name or task type: text} from a file, {} for "mteb", None for "none".

    Raises:
        UserError: not such a file, or a name that is neither a chosen task (or a part of one) nor
            its type.
    """
    if choice in ("mteb", "none"):
        return {} if choice == "mteb" else None
    parts = [part.metadata for task in tasks for part in (task, *getattr(task, "tasks", ()))]
    return read_file(choice, {name for part in parts for name in (part.name, part.type)})


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
    settings = [model_digest(arguments.model), arguments.tokenizer, str(encoder.dtype)]
    settings += [encoder.max_length, encoder.prompts, arguments.pooling]
    settings += [instructions, arguments.instruction_template]
    return hashlib.sha1(json.dumps(settings).encode()).hexdigest()


def evaluate(encoder, arguments, tasks, show_progress_bar=True):
    """Runs the tasks; finished ones are taken from MTEB's result cache in `output`/cache.

    Args:
        encoder: `PackedEncoder`.
        arguments: `MtebArguments`.
        tasks: of `choose_tasks`.
    Returns:
        dict with scores in percent, types, errors, settings, and the environment; also written to
        `output`/<name>.json, beside the scores of other tasks that it holds already.
    Raises:
        UserError: the output holds the scores of other weights or settings under this name.
    """
    name, folder = arguments.row, Path(arguments.output)
    instructions = read_instructions(arguments.instructions, tasks)
    revision = fingerprint(encoder, arguments, instructions)
    earlier = read_run(folder / f"{name}.json") or {}
    if earlier and earlier["fingerprint"] != revision:
        raise UserError(
            f"{folder / name}.json holds the scores of other weights or settings "
            f"({earlier['model']}); give this model another --name, or choose another --output"
        )
    template = arguments.instruction_template
    results = mteb.evaluate(
        PackedModel(encoder, f"neobert/{name}", revision, instructions, template),
        tasks,
        cache=mteb.ResultCache(cache_path=folder / "cache"),
        co2_tracker=False,
        raise_error=False,
        show_progress_bar=show_progress_bar,
        encode_kwargs={"batch_size": 1024, "show_progress_bar": show_progress_bar},
    )
    # A task that failed has None, so that no mean leaves it out.
    scores = earlier.get("scores", {}) | {task.metadata.name: None for task in tasks}
    for result in results.task_results:
        if not math.isnan(score := result.get_score()):
            scores[result.task_name] = round(100 * float(score), 4)
    report = {
        "name": name,
        "model": str(arguments.model),
        "fingerprint": revision,
        "scores": scores,
        "types": earlier.get("types", {}) | {t.metadata.name: t.metadata.type for t in tasks},
        "errors": {error.task_name: error.exception for error in results.exceptions or []},
        "instructions": arguments.instructions,
        "instruction_template": template,
        "dtype": arguments.dtype,
        "max_length": encoder.max_length,
        "environment": environment(dtype=encoder.dtype_name, device=str(encoder.device)),
    }
    write_json(folder / f"{name}.json", report)
    write_tables(folder)
    return report


def main(argv=None, more=()):
    """`neobert mteb --model MODEL --output FOLDER`; returns the exit code.

    Args:
        more: {name: tasks} beside MTEB's own.
    """
    (arguments,) = OPTIONS["mteb"].read(argv or [])
    folder, name = Path(arguments.output), f"{arguments.row}.json"
    check_folder(folder, "output")
    earlier = read_run(folder / name)
    check_result_files(folder, "mteb", earlier, name)
    check_result_files(folder, "mteb", read_runs(folder), "table.md")
    tasks = choose_tasks(arguments.tasks, more)
    read_instructions(arguments.instructions, tasks)
    dtype = arguments.dtype
    if earlier and earlier["dtype"] == dtype == "auto":  # a measurement may turn out otherwise
        dtype = earlier["environment"]["dtype"]
    encoder = PackedEncoder.from_arguments(arguments, choose_device(arguments.device), dtype)
    report = evaluate(encoder, arguments, tasks)
    print(task_table({report["name"]: report}))
    if errors := report["errors"]:
        raise UserError(
            f"{len(errors)} of {len(tasks)} tasks failed ({', '.join(errors)}): "
            f"{one_line(next(iter(errors.values())))}; run again to continue"
        )
    return 0
