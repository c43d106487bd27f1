"""Dataclasses that are pytrees."""

import dataclasses
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def register(cls: type[T]) -> type[T]:
    """`jax.tree_util.register_dataclass`, with trees that `flax.nnx.tabulate` can show inside of a tuple.

    tabulate (flax 0.12) maps results to texts, and of a tuple's items it knows lists, tuples and dicts only. So an
    object of texts in place of arrays is a dict.
    """
    arrays = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]  # pyright: ignore

    def new(cls: type[T], *_: Any, **fields: Any) -> Any:
        return fields if any(isinstance(fields.get(name), str) for name in arrays) else object.__new__(cls)

    cls.__new__ = new
    return jax.tree_util.register_dataclass(cls)
