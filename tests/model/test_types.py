"""Test that public functions have types for their parameters and results.

mypy checks in `make lint` whether the types are correct.
"""

import inspect

import pytest

import neobert
from neobert.attention_neobert import Packing
from neobert.embeddings.packed_encoder import PackedEncoder


PUBLIC = [getattr(neobert, name) for name in neobert.__all__ if not name.startswith("__")]


def public_functions(thing):
    """Yield `thing` if it is a function, or the public functions of a class.

    These are its methods and properties, including inherited ones of this package and `__init__`.
    """
    if inspect.isfunction(thing):
        yield thing
        return

    for cls in thing.__mro__:
        if not cls.__module__.startswith("neobert"):
            continue
        for name, value in vars(cls).items():
            if name.startswith("_") and name != "__init__":
                continue
            is_property = isinstance(value, property)
            functions = (
                (value.fget, value.fset) if is_property else [getattr(value, "__func__", value)]
            )
            yield from filter(inspect.isfunction, map(inspect.unwrap, functions))


@pytest.mark.parametrize("thing", [*PUBLIC, Packing, PackedEncoder], ids=lambda x: x.__name__)
def test_public_functions_have_types(thing):
    """Every parameter except for `self`, `cls`, `*args` and `**kwargs` has a type."""
    missing = []
    for function in public_functions(thing):
        signature = inspect.signature(function)
        for name, parameter in signature.parameters.items():
            is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if (
                name not in ("self", "cls")
                and not is_open
                and parameter.annotation is inspect._empty
            ):
                missing.append(f"{function.__qualname__}({name})")
        if function.__name__ != "__init__" and signature.return_annotation is inspect._empty:
            missing.append(f"{function.__qualname__} ->")

    assert not missing
