"""Dataclasses that are pytrees."""

import dataclasses
import json
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def register(cls: type[T]) -> type[T]:
    """`jax.tree_util.register_dataclass` of a public class, also for `jax.export`, which serializes the trees of a
    program's arguments and results; with trees that `flax.nnx.tabulate` can show inside of a tuple.

    Static fields are texts, by which `jax.export` finds them again. Its name for the class is the public one.

    tabulate (flax 0.12) maps results to texts, and of a tuple's items it knows lists, tuples and dicts only. So an
    object of texts in place of arrays is a dict.
    """
    arrays = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]  # pyright: ignore

    def new(cls: type[T], *_: Any, **fields: Any) -> Any:
        return fields if any(isinstance(fields.get(name), str) for name in arrays) else object.__new__(cls)

    cls.__new__ = new
    jax.tree_util.register_dataclass(cls)
    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jaxops.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
