"""Types of the fields in request bodies that several routes share."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from .options import MAX_CHARACTERS, MAX_TEXTS


_INPUT_RULE = "must be a string, a list of strings, a list of token IDs or a list of such lists"

ItemT = TypeVar("ItemT")


def _as_list(value: Any) -> list[Any]:
    """Return the input of a request as a list of texts or of lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("input", _INPUT_RULE)
    # A list of token IDs is one text, not a batch.
    is_one_text = bool(value) and all(isinstance(item, int) for item in value)
    return [value] if is_one_text else value


def _input_tag(item: Any) -> str | None:
    """Return the tag of an item of `input`, "text" or "tokens"."""
    # Without a tag, pydantic reports `_INPUT_RULE` instead of the errors of both types.
    if isinstance(item, str):
        return "text"
    return "tokens" if isinstance(item, list) else None


Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
# Lists stop at their first invalid item: a body can contain millions, and each error takes 2 KB.
# Integers are strict, because pydantic would accept strings and booleans as integers.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]],
    Field(min_length=1, max_length=MAX_CHARACTERS, fail_fast=True),
]
# At most `MAX_TEXTS` items of a request.
Items = Annotated[list[ItemT], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
InputItem = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS), Tag("text")]
    | Annotated[TokenIds, Tag("tokens")],
    Discriminator(_input_tag, custom_error_type="input", custom_error_message=_INPUT_RULE),
]
# A text, texts, token ids, or lists of token ids.
Input = Annotated[Items[InputItem], BeforeValidator(_as_list)]
Dimensions = Annotated[int, Field(ge=1)] | None


class Body(BaseModel):
    """Fields of all bodies; unknown fields are ignored.

    Attributes:
        truncate: Whether to truncate long texts instead of refusing them; by default as the option
            of the server.
    """

    truncate: bool | None = None
