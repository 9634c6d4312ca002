"""The file task.json of a model that `neobert finetune` has trained. Does not import pyarrow."""

from typing import TypedDict

from .errors import UserError
from .files import difference_from_type, read_json
from .loading import model_file


TASK_FILE = "task.json"

# Names of the tasks.
CLASSIFICATION = "classification"
MULTI_LABEL = "multi-label"
REGRESSION = "regression"
TOKENS = "tokens"


class _RequiredKeys(TypedDict):
    task: str
    text_columns: list[str]
    labels: list[str]
    bio: bool
    max_length: int
    temperature: float
    version: str


class TaskContent(_RequiredKeys, total=False):
    """Content of task.json.

    Attributes:
        task: Name of the task: "classification", "multi-label", "regression" or "tokens".
        text_columns: Column of the text, or the two columns of a pair.
        labels: Class or tag names in the order of their ids; empty for regression.
        bio: Whether tags are those of the BIO scheme.
        max_length: Maximum sequence length in tokens during training.
        temperature: Temperature of the calibration, by which logits are divided.
        version: Version of this package.
        has_spaces: Whether words are separated by spaces. Earlier versions did not write this key.
    """

    has_spaces: bool


def read_task_file(model: str) -> TaskContent | None:
    """Return the content of task.json of a model, or None if the model does not have the file.

    Args:
        model: Directory or Hub name of the model.

    Raises:
        UserError: If the file is damaged.
    """
    path = model_file(model, TASK_FILE)
    if path is None:
        return None
    content = read_json(path)
    if difference := difference_from_type(content, TaskContent):
        raise UserError(
            f"{path} does not describe the task of a model of `neobert finetune` ({difference}). "
            "Restore the file, or remove it to use config.json alone."
        )
    return content
