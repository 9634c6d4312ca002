"""Instructions before a query: their format, and files with one instruction per dataset or task.

The instructions of the paper are in tables 6 to 8 of arXiv 2502.19587. To use them, copy them to
such a file.
"""

from collections.abc import Iterable
from pathlib import Path

from ..common.errors import UserError, listed
from ..common.files import read_json, read_yaml


TEMPLATE = "Instruction: {instruction} Query: "


def read_instructions(
    path: str | Path, used: Iterable[str], others: Iterable[str] = ()
) -> dict[str, str]:
    """Read {name: instruction} from a .json or .yaml file.

    Args:
        path: Path of the file; any suffix but .json is read as YAML.
        used: Names whose instructions are used.
        others: Further names that the file may contain.

    Raises:
        UserError: If the file does not exist, does not map names to texts, or contains an unknown
            name.
    """
    if not Path(path).is_file():
        raise UserError(
            f"`instructions` must be a file that maps names to texts, got {path}, which does not "
            "exist."
        )
    instructions = read_json(path) if Path(path).suffix == ".json" else read_yaml(path)
    is_mapping = isinstance(instructions, dict)
    if not is_mapping or not all(isinstance(text, str) for text in instructions.values()):
        raise UserError(f"{path} must map names to texts.")

    # A misspelled name would leave a task without its instruction.
    names = sorted(set(used))
    known = {*names, *others}
    for name in instructions:
        if name not in known:
            raise UserError(
                f"the names in {path} must be among {listed(names, 100)}, got {name!r}."
            )
    return instructions


def format_instruction(template: str, instruction: str) -> str:
    """Return the prompt for an instruction, "" for an empty instruction."""
    instruction = instruction.strip()
    return template.format(instruction=instruction) if instruction else ""


def check_template(template: str) -> None:
    """Raise UserError unless a template contains `{instruction}` and no other braces."""
    rest = template.replace("{instruction}", "")
    if rest == template or "{" in rest or "}" in rest:
        raise UserError(
            "`instruction_template` must contain {instruction} and no other braces, got "
            f"{template!r}."
        )
