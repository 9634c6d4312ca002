"""Command `neobert mteb`: evaluate an encoder on MTEB with the `mteb` package.

Batches are packed, an interrupted evaluation resumes, and tables of the benchmarks are written.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.abstasks import AbsTask
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.types import PromptType

from ..common.environment import environment
from ..common.errors import UserError, one_line
from ..common.files import write_json
from ..common.folders import check_folder
from ..common.identity import model_digest
from ..common.loading import choose_device
from ..common.options import log_options
from ..common.results import check_result_files
from ..embeddings.instructions import read_instructions as read_instruction_file
from ..embeddings.packed_encoder import PackedEncoder
from .mteb_tables import read_run, read_runs, task_table, write_tables
from .options import BENCHMARKS, OPTIONS, MtebOptions


# Both texts of a symmetric task carry the instruction. In other tasks only the query does.
_INSTRUCTED_SIDES = (None, PromptType.query)


def main(argv: Sequence[str] | None = None, more: Mapping[str, Sequence[AbsTask]] = {}) -> int:
    """Run `neobert mteb --model MODEL --output FOLDER` and return the exit code.

    Args:
        argv: Command line.
        more: Tasks in addition to those of MTEB, {name: tasks}.
    """
    options = OPTIONS["mteb"].read(argv or [])
    log_options(options)
    folder = Path(options.evaluation.output)
    name = f"{options.evaluation.row}.json"

    check_folder(folder, "output")
    earlier = read_run(folder / name)
    check_result_files(folder, "mteb", earlier, name)
    check_result_files(folder, "mteb", read_runs(folder), "table.md")
    tasks = choose_tasks(options.evaluation.tasks, more)
    read_instructions(options.instructions.instructions, tasks)

    dtype = options.inference.dtype
    if earlier and earlier["dtype"] == dtype == "auto":
        # Another measurement of the speed could choose another dtype.
        dtype = earlier["environment"]["dtype"]
    encoder = PackedEncoder(
        options.evaluation.model,
        dtype,
        choose_device(options.inference.device),
        options.inference.batch_tokens,
        **options.encoder.settings(),
    )
    report = evaluate(encoder, options, tasks)

    print(task_table({report["name"]: report}))
    errors = report["errors"]
    if errors:
        raise UserError(
            f"{len(errors)} of {len(tasks)} tasks failed ({', '.join(errors)}): "
            f"{one_line(next(iter(errors.values()))).removesuffix('.')}. Run the same command "
            "again to resume."
        )
    return 0


def choose_tasks(names: Iterable[str], more: Mapping[str, Sequence[AbsTask]] = {}) -> list[AbsTask]:
    """Return the tasks of names of tasks and benchmarks.

    Args:
        names: Names of tasks and benchmarks.
        more: Tasks in addition to those of MTEB, {name: tasks}.

    Raises:
        UserError: If MTEB has no task or benchmark of a name.
    """
    benchmarks = {benchmark.name for benchmark in mteb.get_benchmarks()}
    tasks: dict[str, Any] = {}
    for name in names:
        # A name may be a group of ours, a benchmark of MTEB, or a single task.
        if name in more:
            matches = more[name]
        elif name in benchmarks:
            matches = mteb.get_benchmark(name).tasks
        else:
            try:
                matches = [mteb.get_task(name, languages=["eng"])]
            except KeyError as error:
                raise UserError(
                    f"MTEB has no task or benchmark {name!r} ({error.args[0]}). Benchmarks are "
                    f"{', '.join(BENCHMARKS)} and others."
                ) from None

        tasks |= {task.metadata.name: task for task in matches}
    return list(tasks.values())


def read_instructions(choice: str, tasks: Iterable[AbsTask]) -> dict[str, str] | None:
    """Return the instructions {task name or task type: text} of the option `--instructions`.

    Args:
        choice: A file, "mteb" for the prompts of MTEB, or "none".
        tasks: Tasks that are evaluated.

    Returns:
        The instructions of the file, {} for "mteb", and None for "none".

    Raises:
        UserError: If the file cannot be read, or a name is neither a task, a part of a task nor a
            type of tasks.
    """
    if choice == "mteb":
        return {}
    if choice == "none":
        return None
    names: set[str] = set()
    for task in tasks:
        for part in (task, *getattr(task, "tasks", ())):
            names |= {part.metadata.name, part.metadata.type}
    return read_instruction_file(choice, names)


class PackedModel(AbsEncoder):
    """Adapter of a `PackedEncoder` to the models of MTEB.

    Args:
        encoder: Encoder.
        name: Name under which MTEB caches results.
        revision: Revision under which MTEB caches results. The revision must change with anything
            that changes the embeddings.
        instructions: Instructions that replace those of MTEB, {task name or type: text}, or None
            for no instruction at all.
        template: Format of an instruction before a text.
    """

    prompt_priority = (  # type: ignore[assignment]
        PromptSource.CUSTOM_PROMPT,
        PromptSource.TASK_TYPE_PROMPT,
        PromptSource.DEFAULT_TASK_PROMPT,
    )

    def __init__(
        self,
        encoder: PackedEncoder,
        name: str,
        revision: str,
        instructions: dict[str, str] | None,
        template: str,
    ) -> None:
        self.encoder = encoder
        self.model = encoder.sentence_transformer
        self.prompts_dict = instructions
        self.instruction_template = template
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def prompt(self, task_metadata: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Return the text before each text of a task and side."""
        if self.prompts_dict is None or prompt_type not in _INSTRUCTED_SIDES:
            return ""
        return self.get_task_instruction(task_metadata, prompt_type)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Return the embeddings of all texts of a loader, (N, D) float32, batched by tokens."""
        texts = [text for batch in inputs for text in batch["text"]]
        return self.encoder.encode(
            texts,
            prompt=self.prompt(task_metadata, prompt_type),
            show_progress_bar=kwargs.get("show_progress_bar", True),
        )


def fingerprint(
    encoder: PackedEncoder, options: MtebOptions, instructions: dict[str, str] | None
) -> str:
    """Return 40 hex digits that change with the model and every option that affects embeddings."""
    settings = [
        model_digest(options.evaluation.model),
        options.encoder.tokenizer,
        str(encoder.dtype),
        encoder.max_length,
        encoder.prompts,
        options.encoder.pooling,
        instructions,
        options.instructions.instruction_template,
    ]
    return hashlib.sha1(json.dumps(settings).encode()).hexdigest()


def evaluate(
    encoder: PackedEncoder,
    options: MtebOptions,
    tasks: Collection[AbsTask],
    show_progress_bar: bool = True,
) -> dict[str, Any]:
    """Evaluate the tasks and write the results.

    Results of finished tasks are read from MTEB's result cache in `output`/cache.

    Args:
        encoder: Encoder.
        options: Options of the command.
        tasks: Tasks, from `choose_tasks`.
        show_progress_bar: Whether to show progress bars.

    Returns:
        Scores in percent, types, errors, settings and the environment, which are also written to
        `output`/NAME.json together with earlier scores of other tasks.

    Raises:
        UserError: If the output contains scores of other weights or settings under this name.
    """
    name = options.evaluation.row
    folder = Path(options.evaluation.output)
    template = options.instructions.instruction_template
    instructions = read_instructions(options.instructions.instructions, tasks)
    revision = fingerprint(encoder, options, instructions)

    earlier = read_run(folder / f"{name}.json") or {}
    if earlier and earlier["fingerprint"] != revision:
        raise UserError(
            f"{folder / name}.json contains the scores of other weights or settings "
            f"({earlier['model']}). Pass another --name or another --output."
        )

    results = mteb.evaluate(
        PackedModel(  # type: ignore[arg-type]
            encoder, f"neobert/{name}", revision, instructions, template
        ),
        tasks,
        cache=mteb.ResultCache(cache_path=folder / "cache"),
        co2_tracker=False,
        # The other tasks run after an error, which the report contains.
        raise_error=False,
        show_progress_bar=show_progress_bar,
        encode_kwargs={  # type: ignore[arg-type]
            "batch_size": 1024,
            "show_progress_bar": show_progress_bar,
        },
    )

    # A task that failed has the score None, so that no mean leaves the task out.
    scores = earlier.get("scores", {}) | {task.metadata.name: None for task in tasks}
    for result in results.task_results:
        score = result.get_score()
        if not math.isnan(score):
            scores[result.task_name] = round(100 * float(score), 4)

    types = {task.metadata.name: task.metadata.type for task in tasks}

    report = {
        "name": name,
        "model": str(options.evaluation.model),
        "fingerprint": revision,
        "scores": scores,
        "types": earlier.get("types", {}) | types,
        "errors": {error.task_name: error.exception for error in results.exceptions or []},
        "instructions": options.instructions.instructions,
        "instruction_template": template,
        "dtype": options.inference.dtype,
        "max_length": encoder.max_length,
        "environment": environment(dtype=encoder.dtype_name, device=str(encoder.device)),
    }
    write_json(folder / f"{name}.json", report)
    write_tables(folder)
    return report
