"""The mean of a run's last checkpoints, kept as its final model where it is better on held-out text
(Izmailov et al. 2018, arXiv 1803.05407; of a model's last checkpoints: Vaswani et al. 2017)."""

import math
import statistics
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..common.errors import UserError, one_line


def averaged_steps(training, count):
    """The last `count` steps at which a run saves, ascending: its last one and the multiples of
    save_steps before it. A checkpoint that SIGTERM saved is none of them."""
    every, last = training.save_steps, training.max_steps
    every = max(1, math.ceil(last * every)) if every < 1 else int(every)
    return [*range(every, last, every), last][-count:]


def check_average(run):
    """Raises UserError where `average_last` has no text to decide by, or asks for more checkpoints
    than the run keeps."""
    count, training = run.run.average_last, run.training
    if count is None:
        return
    if run.data.heldout is None:
        raise UserError("average_last needs held-out text to decide by: give heldout")
    if training.save_strategy != "steps":
        raise UserError("average_last needs save_strategy steps")
    limit, saved = training.save_total_limit, len(averaged_steps(training, count))
    if limit and limit < count:
        raise UserError(
            f"average_last {count} is more than the {limit} checkpoints that are kept; give "
            f"save_total_limit: {count}"
        )
    if saved < count:
        raise UserError(
            f"average_last {count} is more than the {saved} checkpoints of {training.max_steps:,} "
            f"steps with save_steps {training.save_steps}; lower one of the two"
        )


def mean_weights(checkpoints):
    """{name: tensor}: the mean of the weights of checkpoints, summed in float64.

    Raises:
        UserError: a checkpoint is not there or cannot be read.
    """
    total = {}
    for folder in checkpoints:
        files = sorted(Path(folder).glob("*.safetensors"))
        try:
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        except Exception as error:  # safetensors' own for a torn file, OSError
            raise UserError(
                f"average_last: {folder} cannot be read ({one_line(error)}); leave average_last out"
            ) from error
        if not weights or (total and weights.keys() != total.keys()):
            raise UserError(
                f"average_last: {folder} is not there or is another model's; leave average_last out"
            )
        for name, tensor in weights.items():
            total[name] = total.get(name, 0) + tensor.double()
    return {name: tensor / len(checkpoints) for name, tensor in total.items()}


def bits_of(metrics):
    """The mean of bits a character over the held-out sets, each of which counts alike."""
    return statistics.mean(
        value for name, value in metrics.items() if name.endswith("bits_per_character")
    )


def keep_better(trainer, count, metrics):
    """Gives the trainer's model the mean of the last `count` checkpoints where it has fewer bits a
    character; all processes must call it.

    Args:
        trainer: `PretrainingTrainer` after its training.
        metrics: of the weights that it has.
    Returns:
        the metrics of the weights that are kept, and for result.json the steps, both figures and
        which of them is kept.
    """
    steps = averaged_steps(trainer.args, count)
    output, model = Path(trainer.args.output_dir), trainer.model
    mean = mean_weights([output / f"checkpoint-{step}" for step in steps])
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name in mean:  # tied weights are saved once
                parameter.copy_(mean[name])
    measured = trainer.measure()
    bits = {"last": bits_of(metrics), "mean": bits_of(measured)}
    kept = min(bits, key=bits.get)
    if kept == "last":
        model.load_state_dict(last)
    if trainer.is_world_process_zero():
        print(
            f"the mean of checkpoints {', '.join(map(str, steps))} has {bits['mean']:.4f} bits a "
            f"character on the held-out text, the last weights {bits['last']:.4f}: the {kept} "
            f"{'is' if kept == 'mean' else 'weights are'} kept",
            file=sys.stderr,
        )
    found = {"steps": steps, "bits_per_character": bits, "kept": kept}
    return (measured if kept == "mean" else metrics), found
