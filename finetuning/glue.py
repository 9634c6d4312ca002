"""`neobert glue`: the paper's GLUE protocol (its section 4.2) for any encoder, full or LoRA, with
several seeds, and its table.

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model google-bert/bert-base-uncased --grid --seeds 1 2 3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every finished run is a folder OUTPUT/<name>/<task>/<run>/ with result.json; the same command again
skips it and continues an unfinished one from its newest checkpoint. OUTPUT/table.md and table.json
are made from all result.json files under OUTPUT.
"""

import hashlib
import json
import logging
import re
import shutil
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

from ..common.errors import UserError
from ..common.files import read_json
from ..common.folders import check_place
from ..common.identity import files_digest, model_digest
from ..common.loading import check_there, load_tokenizer
from ..common.output import Output
from .glue_run import check_sizes, fine_tune, process_state
from .glue_table import check_table, finished_runs, label_of, row_label, write_tables
from .glue_tasks import load_task, parse_tasks, rows_digest
from .options import OPTIONS


logger = logging.getLogger("neobert.glue")


def run_folder(arguments, settings):
    """OUTPUT/<name>/<task>/<readable part and a digest of all settings>."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    lora = f"_lora{settings['lora']['rank']}" if settings["lora"] else ""
    hyper = "bs{batch_size}_lr{learning_rate:g}_wd{weight_decay:g}".format(**settings)
    name = re.sub(r"[^\w.-]+", "-", arguments.name)
    run = f"{hyper}{lora}_seed{settings['seed']}_{digest}"
    return Path(arguments.output) / name / settings["task"] / run


def _label(arguments):
    """The row of the table that these arguments' runs are in."""
    settings = {**vars(arguments), "lora": arguments.lora_settings()}
    return row_label(arguments.name, arguments.data, settings)


def runs_of_row(arguments, task):
    """[(selection score, folder, result)] of the finished runs in this row and task, best last."""
    runs = [
        (result["selected"]["score"], folder, result)
        for folder, result in finished_runs(arguments.output)
        if label_of(result) == _label(arguments) and result["task"] == task
    ]
    return sorted(runs, key=lambda run: run[:2])


def mnli_start(arguments, revision):
    """Folder of the best finished MNLI run of this model under this protocol, by the score that
    selected its checkpoint, over seeds and grid; None where there is none."""
    folders = [
        folder
        for _, folder, result in runs_of_row(arguments, "mnli")
        if result["settings"]["revision"] == revision and (folder / "best/config.json").is_file()
    ]
    return folders[-1] if folders else None


def _start(arguments, task, revision):
    """(what the run starts from for its settings, model to load)."""
    if not task.from_mnli or arguments.start == "none":
        return None, arguments.model
    folder = mnli_start(arguments, revision)
    if folder is not None:
        logger.warning("%s starts from the best MNLI run, %s", task.name, folder.name)
        return folder.name, str(folder / "best")
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


def run_task(arguments, trainer, task, splits, tokenizer, known):
    """All runs of one task; returns the results of the chosen hyper-parameters, one a seed.

    Args:
        trainer: {option of Trainer: value}.
        known: {"revision", "tokenizer"}, what the model and its tokenizer are known by.
    """
    start, model = _start(arguments, task, known["revision"])
    known = {**known, "rows": rows_digest(splits), "start": start}

    def run(hyper, seed):
        settings = arguments.settings(trainer, task, hyper, seed, **known)
        output = Output(run_folder(arguments, settings), "glue", settings)
        if output.state() == "finished":
            logger.warning("%s is finished already: %s", task.name, output.folder)
            return read_json(output.result)
        logger.warning("%s: %s", task.name, output.folder.name)
        result = fine_tune(output, settings, splits, model, tokenizer, arguments, trainer)
        score, last = 100 * result["score"], 100 * result["last"]["score"]
        logger.warning("%s: dev %.2f, last evaluation %.2f", output.folder.name, score, last)
        if process_state().is_main_process:
            _prune(arguments, task)
        return result

    combinations = arguments.combinations(task)
    chosen = combinations[0]
    if len(combinations) > 1:
        tried = [run(hyper, arguments.seeds[0])["selected"]["score"] for hyper in combinations]
        chosen = combinations[tried.index(max(tried))]
        logger.warning("%s: best of %d combinations: %s", task.name, len(combinations), chosen)
    return [run(chosen, seed) for seed in arguments.seeds]


def _prune(arguments, task):
    """Deletes weights that `keep_models` does not keep; results and adapters stay."""
    if arguments.keep_models == "all":
        return
    runs = [run for run in runs_of_row(arguments, task.name) if (run[1] / "best").is_dir()]
    keeps = arguments.keep_models == "best" or task.name == "mnli"
    for _, folder, _ in runs[:-1] if keeps else runs:
        shutil.rmtree(folder / "best")


def check(arguments, tasks):
    """What can be wrong with any of the tasks is found here, before the first is trained. Returns
    the tokenizer, what model and tokenizer are known by, and {task: splits}."""
    check_place(arguments.output)
    check_table(arguments.output)
    revision = model_digest(arguments.model)
    tokenizer_source = arguments.tokenizer or arguments.model
    check_there(tokenizer_source)
    data = {task.name: load_task(task, arguments.data) for task in tasks}
    for task in tasks:
        if arguments.metric not in ("mean", *task.metrics):
            raise UserError(
                f"{task.name} has no metric {arguments.metric!r}; choose mean, or from "
                f"{', '.join(task.metrics)}"
            )
        sizes = {hyper["batch_size"] for hyper in arguments.combinations(task)}
        check_sizes(task, len(data[task.name]["train"]["label"]), sizes, arguments)
        if arguments.start == "mnli" and "mnli" not in data:
            _start(arguments, task, revision)
    for folder, result in finished_runs(arguments.output):
        # A row of the table holds one model, and one set of rows of a task.
        previous, task = result["settings"], result["task"]
        is_other = result["name"] == arguments.name and previous["revision"] != revision
        if label_of(result) == _label(arguments) and task in data:
            is_other = is_other or previous.get("rows") != rows_digest(data[task])
        if is_other:
            raise UserError(
                f"{folder} is a run of other weights or rows under the name {arguments.name!r}; "
                "give another --name or another --output"
            )
    tokenizer = arguments.tokenizer
    if tokenizer and Path(tokenizer).is_dir():
        tokenizer = files_digest(path for path in Path(tokenizer).iterdir() if path.is_file())
    known = {"revision": revision, "tokenizer": tokenizer}
    return load_tokenizer(tokenizer_source), known, data


def main(argv=None):
    """Runs `neobert glue`; bad input is a UserError before any work."""
    arguments, trainer = OPTIONS["glue"].read(sys.argv[1:] if argv is None else argv)
    is_main = process_state().is_main_process
    logging.basicConfig(format="%(message)s")
    logger.disabled = not is_main
    tasks = parse_tasks(arguments.task)
    verbosity = transformers_logging.get_verbosity()
    # its own report on new heads; `fine_tune` says it in one line
    transformers_logging.set_verbosity_error()
    try:
        tokenizer, known, data = check(arguments, tasks)
        for task in tasks:
            run_task(arguments, trainer, task, data[task.name], tokenizer, known)
            if is_main:
                write_tables(arguments.output)
    finally:
        transformers_logging.set_verbosity(verbosity)
    if is_main:
        print((Path(arguments.output) / "table.md").read_text())
    return 0
