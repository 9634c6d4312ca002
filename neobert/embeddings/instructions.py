"""Instructions before a query: how one is put there, and files of them by data set or task.

Tables 6 to 8 of the paper (arXiv 2502.19587) list the authors' own. Who has them writes them into
such a file and runs exactly these.
"""

from pathlib import Path

from ..common.errors import UserError, listed
from ..common.files import read_json, read_yaml


TEMPLATE = "Instruction: {instruction} Query: "


def read_instructions(path, known):
    """{name: instruction} of a .json or .yaml file.

    Args:
        known: names that may be in it.
    Raises:
        UserError: no such file, no mapping of names to texts, or a name that is not known.
    """
    if not Path(path).is_file():
        raise UserError(
            f"instructions must be a file that maps names to texts, but there is no file {path}"
        )
    instructions = read_json(path) if Path(path).suffix == ".json" else read_yaml(path)
    if not isinstance(instructions, dict) or not all(
        isinstance(text, str) for text in instructions.values()
    ):
        raise UserError(f"{path} must map names to texts")
    for name in instructions:
        if name not in known:
            raise UserError(
                f"{path}: there is no {name!r} here; the names are {listed(sorted(known), 100)}"
            )
    return instructions


def prompt(template, instruction):
    """The text before a query, "" without an instruction."""
    return template.format(instruction=instruction.strip()) if instruction.strip() else ""


def check_template(template):
    """Raises UserError for a template without `{instruction}`, or with other braces."""
    try:
        if template.format(instruction="x") != template:
            return
    except (KeyError, IndexError, ValueError):
        pass
    raise UserError(
        f"instruction_template must contain {{instruction}}, and no other braces, but {template!r} "
        "was given"
    )
