"""The fields of a model's configuration that a recipe may give, under NeoBERTConfig's names and
those that it also understands."""

from ..configuration_neobert import ALIASES, NeoBERTConfig
from .arguments import nearest
from .errors import UserError


def spellings(field):
    """The set of all names of a field."""
    return {field, *(alias for alias, fields in ALIASES.items() if field in fields)}


def check_model_fields(given, where):
    """Raises UserError for a name that NeoBERTConfig does not know.

    Args:
        given: {field: value}.
        where: the option that holds them, for the message.
    """
    known = [*NeoBERTConfig().to_dict(), "rope_theta", "rope_scaling", *ALIASES]
    for name in given:
        if name not in known:
            raise UserError(
                f"{where} has an unknown field "
                f"{name!r}{nearest(name, known, otherwise='NeoBERTConfig lists the fields')}"
            )
