"""Argument checks of ops, with messages that name the argument, the axis and the sizes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName, nearest

__all__ = [
    "Axes",
    "axis_size",
    "check_arrays",
    "check_floating",
    "check_integer",
    "check_known",
    "check_positive",
    "check_same_dtype",
    "check_static",
    "check_window",
]


class Axes:
    """Sizes of an op's named axes, collected from its arguments.

    >>> axes = Axes("linear")
    >>> axes.match("x", x, "... d_in")
    >>> axes.match("weight", weight, "d_in d_out")   # raises ShapeError when the two sizes of d_in differ
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._known: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, axis: str) -> Any:
        return self._known[axis][0]

    def match(self, name: str, array: Any, axes: str, *, broadcast: bool = False) -> None:
        """Binds the axes of one argument or compares them with their known sizes; skips None.

        Args:
          name: name of the argument in messages.
          array: the argument.
          axes: axis names, or a number for an axis with a fixed size; a leading "..." stands for any number of axes,
            the same in all arguments.
          broadcast: whether size 1 is also accepted.

        Raises:
          ShapeError: wrong number of axes, or sizes differ.
        """
        if array is None:
            return
        check_arrays(self._op, **{name: array})
        names, shape = axes.split(), tuple(array.shape)
        if names[0] == "...":
            named = len(names) - 1
            fits, sizes = len(shape) >= named, (shape[: len(shape) - named], *shape[len(shape) - named :])
        else:
            fits, sizes = len(shape) == len(names), shape
        if not fits:
            raise ShapeError(f"{self._op}: {name} has shape {shape}; expected the axes [{', '.join(names)}].")
        for axis, size in zip(names, sizes, strict=True):
            fixed = (int(axis), "its layout") if axis.isdecimal() else (size, name)
            known, source = self._known.setdefault(axis, fixed)
            if size != known and not (broadcast and size == 1):
                raise ShapeError(
                    f"{self._op}: axis {axis!r} is {size} in {name}, but {known} in {source}. "
                    f"{name}[{', '.join(names)}] has shape {shape}; make the two sizes equal."
                )


def check_arrays(op: str, **arrays: Any) -> None:
    """Raises ArgumentError if an argument is neither an array nor None, such as a list of numbers."""
    for name, array in arrays.items():
        if array is not None and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise ArgumentError(
                f"{op}: {name} is of type {type(array).__name__}; expected an array. Convert it: jnp.asarray({name})."
            )


def check_floating(op: str, **arrays: Any) -> None:
    """Raises ArgumentError if an array does not have a floating dtype."""
    check_arrays(op, **arrays)
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ArgumentError(f"{op}: {name} has dtype {array.dtype}; expected a floating dtype.")


def check_integer(op: str, **arrays: Any) -> None:
    """Raises ArgumentError if an array does not have an integer dtype."""
    check_arrays(op, **arrays)
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ArgumentError(f"{op}: {name} has dtype {array.dtype}; expected an integer dtype.")


def check_same_dtype(op: str, **arrays: Any) -> None:
    """Raises ArgumentError if dtypes differ, since ops do not promote their operands."""
    check_arrays(op, **arrays)
    dtypes = {name: jnp.dtype(array.dtype) for name, array in arrays.items() if array is not None}
    if len(set(dtypes.values())) > 1:
        listing = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ArgumentError(f"{op}: the operands have different dtypes ({listing}); cast them to one dtype first.")


def check_known(op: str, name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UnknownName if `value` is not in `known`."""
    if value not in known:
        raise UnknownName(f"{op}: unknown {name} {value!r}.{nearest(str(value), known)} Known: {', '.join(known)}.")


def check_static(op: str, **options: Any) -> None:
    """Raises ArgumentError if an option is or contains an array, since options are static."""
    for name, option in options.items():
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(option)):
            raise ArgumentError(f"{op}: {name} is an array; expected a Python number, which is fixed when tracing.")


def check_positive(op: str, **values: float | None) -> None:
    """Raises ArgumentError if a value is neither None nor a positive Python number."""
    check_static(op, **values)
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ArgumentError(f"{op}: {name} is {value}; expected a positive number or None.")


def check_window(op: str, window: Any) -> None:
    """Raises ArgumentError if `window` is neither None nor a pair of distances."""
    if window is None:
        return
    check_static(op, window=window)
    sides = tuple(window)
    if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
        raise ArgumentError(f"{op}: window is {window}; expected (left, right), each None or at least 0.")


def axis_size(op: str, axis_name: str | tuple[str, ...]) -> int:
    """Returns the number of devices along manual mesh axes; raises ArgumentError for an axis that is not bound."""
    try:
        return lax.axis_size(axis_name)
    # JAX's class for an axis that no `shard_map` binds.
    except NameError as error:
        bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
        raise ArgumentError(
            f"{op}: axis_name is {axis_name!r}, which is not bound here; bound by jax.shard_map: {bound}. "
            "Call the op inside jax.shard_map over a mesh with that axis."
        ) from error
