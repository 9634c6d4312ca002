"""What a run with init_from won and lost: `adaptation.md` in its output."""

from ..common.files import write_text
from ..common.results import markdown_table


MEASURES = ("bits_per_character", "masked_accuracy")
_NOTE = (
    "Bits a character: the masked-LM loss in bits, by the characters of the masked tokens' text; "
    "fewer is better. ± is the standard error over the batches of held-out text."
)


def write_report(path, history, metrics, replaced):
    """Writes the held-out figures before the first step and after the last one.

    Args:
        path: of the page.
        history: `log_history` of the run.
        metrics: {`metric_name`: value} of the final model.
        replaced: whether the run replaced the vocabulary of its start, so that its first figures
            are those of new rows and no start to compare with.
    """
    first = {key: record[key] for record in history if record["step"] == 0 for key in record}
    rows = []
    for key in (key for key in metrics if key.endswith(MEASURES)):
        error = f"{key}_error"
        cells = [
            f"{values[key]:.3f}" + (f" ± {values[error]:.3f}" if error in values else "")
            for values in (first, metrics)
        ]
        change = "" if replaced else f"{metrics[key] - first[key]:+.3f}"
        rows.append([key.removeprefix("eval_").replace("_", " "), *cells, change])
    before = "with its new rows, untrained" if replaced else "the model given"
    table = markdown_table(["held-out text", before, "after", "change"], rows)
    write_text(path, f"# Before and after\n\n{table}\n{_NOTE}\n")
