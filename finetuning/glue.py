"""`neobert glue`: the paper's GLUE protocol (its section 4.2) for any encoder, full or LoRA, with
several seeds, and its table.

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model google-bert/bert-base-uncased --grid --seeds 1 2 3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every finished run is a folder OUTPUT/<name>/<task>/<run>/ with result.json; the same command again
skips it and continues an unfinished one from its newest complete checkpoint. OUTPUT/table.md and
table.json are made from all result.json files under OUTPUT.
"""

import hashlib
import logging
import re
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

from ..common.checkpoints import is_main
from ..common.errors import UserError
from ..common.files import read_json
from ..common.identity import model_digest
from ..common.loading import check_model, check_there, check_vocabulary, load_tokenizer
from ..common.outputs import check_apart, check_folder
from ..common.runs import remove_files
from .glue_table import finished_runs, read_result, same_row, write_tables
from .glue_tasks import TASKS, load_task, parse_tasks, rows_digest
from .options import OPTIONS, RunSettings


logger = logging.getLogger("neobert.glue")


def slug(name):
    """`name` as a folder name."""
    return re.sub(r"[^\w.-]+", "-", name)


def run_folder(arguments, settings):
    """OUTPUT/<name>/<task>/<readable part and a digest of all settings>."""
    digest = hashlib.sha256(f"{settings.key()}{settings.seed}".encode()).hexdigest()[:8]
    lora = f"_lora{settings.lora['rank']}" if settings.lora else ""
    run = f"bs{settings.batch_size}_lr{settings.learning_rate:g}_wd{settings.weight_decay:g}{lora}_seed{settings.seed}_{digest}"  # noqa: E501
    return Path(arguments.output) / slug(arguments.name) / settings.task / run


def mnli_start(arguments, revision):
    """(run, folder of its weights) of the best finished MNLI run of this model under this protocol,
    or None.

    Best by the score that selected its checkpoint, over seeds and grid.
    """
    found = [
        (result["selected"]["score"], folder)
        for folder, result in finished_runs(arguments.output)
        if same_row(arguments, result, "mnli")
        and result["settings"]["revision"] == revision
        and (folder / "best" / "config.json").is_file()
    ]
    if not found:
        return None
    folder = max(found)[1]
    return folder.name, folder / "best"


def _start(arguments, task, revision):
    """(what the run starts from for its settings, model to load)."""
    if not task.from_mnli or arguments.start == "none":
        return None, arguments.model
    found = mnli_start(arguments, revision)
    if found is not None:
        logger.warning("%s starts from the best MNLI run, %s", task.name, found[0])
        return found[0], str(found[1])
    if arguments.start == "mnli":
        raise UserError(
            f"{task.name} was asked to start from MNLI, but {arguments.output} has no finished "
            f"MNLI run of {arguments.name} with these settings; "
            "run --task mnli first, or use --start none"
        )
    logger.warning(
        "%s starts from %s itself: there is no finished MNLI run under %s (the paper starts from "
        "MNLI; run --task mnli first)",
        task.name,
        arguments.model,
        arguments.output,
    )
    return None, arguments.model


def run_task(arguments, trainer, task, splits, tokenizer, revision):
    """All runs of one task; returns the results of the chosen hyper-parameters, one a seed.

    Args:
        trainer: {option of Trainer: value}.
    """
    from .glue_run import fine_tune

    start, model = _start(arguments, task, revision)
    rows = rows_digest(splits)

    def run(hyper, seed):
        settings = RunSettings.of(
            arguments, trainer, task, hyper, seed, revision=revision, rows=rows, start=start
        )
        folder = run_folder(arguments, settings)
        if (result := read_result(folder / "result.json")) is not None:
            logger.warning("%s is finished already: %s", task.name, folder)
            return result
        logger.warning("%s: %s", task.name, folder.name)
        result = fine_tune(settings, splits, model, tokenizer, folder, arguments, trainer)
        logger.warning(
            "%s: dev %.2f, last evaluation %.2f",
            folder.name,
            100 * result["score"],
            100 * result["last"]["score"],
        )
        _prune(arguments, task)
        return result

    combinations = arguments.combinations(task)
    chosen = combinations[0]
    if len(combinations) > 1:
        tried = [run(hyper, arguments.seeds[0]) for hyper in combinations]
        chosen = combinations[max(range(len(tried)), key=lambda i: tried[i]["selected"]["score"])]
        logger.warning("%s: best of %d combinations: %s", task.name, len(combinations), chosen)
    return [run(chosen, seed) for seed in arguments.seeds]


def _prune(arguments, task):
    """Deletes weights that `keep_models` does not keep; results and adapters stay."""
    if arguments.keep_models == "all" or not is_main():
        return
    runs = [
        (result["selected"]["score"], folder)
        for folder, result in finished_runs(arguments.output)
        if same_row(arguments, result, task.name)
    ]
    runs = sorted(run for run in runs if (run[1] / "best").is_dir())
    kept = runs[-1:] if arguments.keep_models == "best" or task.name == "mnli" else []
    for _, folder in runs:
        if folder not in [run[1] for run in kept] and (folder / "glue.json").is_file():
            marker = read_json(folder / "glue.json")
            remove_files(
                folder,
                {
                    name: stamp
                    for name, stamp in marker.get("files", {}).items()
                    if name.startswith("best/")
                },
            )


def check(arguments, trainer, tasks):
    """Everything that can be wrong is found here, before any training. Returns tokenizer, revision
    and {task: splits}."""
    from ..training.lora import head_modules, lora_config
    from .glue_model import load_classifier
    from .glue_run import check_sizes, trainer_arguments

    check_folder(arguments.output, "output")
    for task in tasks:
        arguments.combinations(task)
        arguments.check_metric(task)
    check_model(arguments.model)
    check_there(arguments.tokenizer or arguments.model)
    check_apart(
        arguments.output,
        *(
            path
            for path in (arguments.model, arguments.data, arguments.tokenizer)
            if path and Path(path).exists()
        ),
    )
    data = {task.name: load_task(task, arguments.data) for task in tasks}
    tokenizer_source = arguments.tokenizer or arguments.model
    model, new = load_classifier(
        arguments.model,
        tasks[0],
        arguments.head_dropout,
        arguments.trust_remote_code,
        arguments.classifier_pooling,
    )
    tokenizer = load_tokenizer(tokenizer_source)
    check_vocabulary(tokenizer, model, arguments.model)
    if new:
        logger.warning(
            "%s has no head for this task; new and random: %s", arguments.model, ", ".join(new)
        )
    if arguments.lora:
        lora_config(model, **arguments.lora_settings(), modules_to_save=head_modules(model, new))
    del model
    revision = model_digest(arguments.model)
    if arguments.start == "mnli" and TASKS["mnli"] not in tasks:
        for task in tasks:
            _start(arguments, task, revision)
    for task in tasks:
        sizes = {found["batch_size"] for found in arguments.combinations(task)}
        check_sizes(task, len(data[task.name]["train"]["label"]), sizes, arguments)
        for hyper in arguments.combinations(task):
            settings = RunSettings.of(
                arguments, trainer, task, hyper, arguments.seeds[0], revision=revision
            )
            trainer_arguments(settings, trainer, arguments.output, 1000)
    _check_same_origin(
        arguments, revision, {name: rows_digest(splits) for name, splits in data.items()}
    )
    return tokenizer, revision, data


def _check_same_origin(arguments, revision, rows):
    """Raises UserError when `output` has runs of this name from other weights, or of these tasks
    from other rows: a row holds one model.

    Args:
        rows: {task: digest of its rows}.
    """
    for folder, result in finished_runs(arguments.output):
        settings = result["settings"]
        if result["name"] == arguments.name and settings.get("revision", revision) != revision:
            raise UserError(
                f"{folder.parent.parent} holds runs of other weights ({result.get('model')}) under "
                f"the name {arguments.name!r}; "
                "give this model another --name, or choose another --output"
            )
        task = result["task"]
        if (
            same_row(arguments, result, task)
            and settings.get("rows")
            and settings["rows"] != rows.get(task, settings["rows"])
        ):
            raise UserError(
                f"the rows of {task} in {arguments.data} are not those of the finished runs in "
                f"{folder.parent}; choose another --output or --name"
            )


def main(argv=None):
    """Runs `neobert glue`; bad input is a UserError before any work."""
    arguments, trainer = OPTIONS["glue"].read(sys.argv[1:] if argv is None else argv)
    from .glue_run import process_state

    main_process = process_state().is_main_process
    logging.basicConfig(format="%(message)s")
    logger.disabled = not main_process
    tasks = parse_tasks(arguments.task)
    verbosity = transformers_logging.get_verbosity()
    # its own report on new heads; `check` says it in one line
    transformers_logging.set_verbosity_error()
    try:
        tokenizer, revision, data = check(arguments, trainer, tasks)
        for task in tasks:
            run_task(arguments, trainer, task, data[task.name], tokenizer, revision)
            if main_process:
                write_tables(arguments.output)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if main_process:
        print((Path(arguments.output) / "table.md").read_text())
    return 0
