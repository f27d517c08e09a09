"""What the speed of a call depends on: its sizes, by which measurements are near or far, and traits, which must agree.

Traits are dtypes, which arrays are given, how operands are quantized and which options are on; their values are left
out where no kernel cares, as with `scale` or `theta`. Sizes are the op's axes under their own names, and the integers
among the options, such as the sides of a window.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import OpCall
from stack_core.ops.defining import op_named
from stack_kernels.roofline import work_of

__all__ = ["CallShape", "bucket_of", "shape_of"]

# The arrays that an op's sizes are read from, with their axes; "*rows" is the product of all leading axes.
_AXES: Mapping[str, Mapping[str, str]] = {
    "attention": {
        "query": "batch q_seq heads head_dim",
        "key": "batch kv_seq kv_heads head_dim",
        "value": "batch kv_seq kv_heads value_dim",
    },
    "collective_matmul": {"x": "*rows d_in", "weight": "d_in d_out"},
    "exchange": {"x": "rows d", "group_sizes": "groups"},
    "gated_linear_unit": {"x": "*rows d_in", "w_gate": "d_in d_out"},
    "linear": {"x": "*rows d_in", "weight": "d_in d_out"},
    "linear_attention": {"query": "batch seq heads key_dim", "value": "batch seq heads value_dim"},
    "linear_cross_entropy": {"hidden": "*rows embed", "weight": "embed vocab"},
    "low_rank": {"x": "*rows d_in", "down": "adapters d_in rank", "up": "adapters rank d_out"},
    "norm": {"x": "*rows features"},
    "paged_attention": {"query": "tokens heads head_dim", "block_tables": "batch pages_per_seq"},
    "ragged_dot": {"lhs": "rows d_in", "rhs": "groups d_in d_out"},
    "ring_attention": {
        "query": "batch q_seq heads head_dim",
        "key": "batch kv_seq kv_heads head_dim",
        "value": "batch kv_seq kv_heads value_dim",
    },
    "rope": {"x": "*batch seq heads head_dim"},
}
_PAGE_AXES = {"p": "pages", "h": "kv_heads", "s": "slots", "2": "pools", "d": "head_dim"}

# Products with one row take other paths than those with several, on every kind of hardware.
_ROWS = ("rows", "q_seq")
_BROADCAST = ("bias", "mask")
_WITHOUT_EFFECT = ("ignore_index",)
_EXACT_UP_TO = 16


@dataclass(frozen=True)
class CallShape:
    """One kind of call of an op.

    Attributes:
      traits: names and values of what must agree, sorted.
      sizes: names and values of what may be near, sorted.
      flops: of its products.
      traffic_bytes: of its operands and results.
    """

    op: str
    traits: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...]
    flops: int
    traffic_bytes: int

    @property
    def bucket(self) -> tuple[tuple[str, int], ...]:
        """The sizes, rounded so that neighbours such as 8192 and 8193 share a bucket."""
        return tuple((name, bucket_of(size)) for name, size in self.sizes)

    def distance(self, other: "CallShape") -> float:
        """How far apart the sizes are: the sum of |log2| of their ratios, 3 where one is eight times the other's.

        Infinite where the calls differ in anything but their sizes.
        """
        mine, others = dict(self.sizes), dict(other.sizes)
        if (self.op, self.traits, mine.keys()) != (other.op, other.traits, others.keys()):
            return math.inf
        return sum(_octaves(size, others[name]) for name, size in mine.items())

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes)


def _octaves(size: int, other: int) -> float:
    """|log2| of the ratio; from a negative number, as a query offset may be, to others the way leads through zero."""
    if (size < 0) != (other < 0):
        return _octaves(abs(size), 0) + _octaves(abs(other), 0)
    return abs(math.log2((abs(size) + 1) / (abs(other) + 1)))


def bucket_of(size: int) -> int:
    """The nearest number of three significant bits; sizes up to 16 are told apart."""
    if size <= _EXACT_UP_TO:
        return size
    unit = 1 << (size.bit_length() - 3)
    return (size + unit // 2) // unit * unit


def shape_of(call: OpCall) -> CallShape:
    """The kind of a call of an op, from shapes, dtypes and options alone, which must be hashable."""
    leaves, structure = jax.tree.flatten(dict(call.arrays))
    return _shape_of(call.op, structure, tuple(leaves), tuple(call.options.items()), call.direction)


@functools.lru_cache(maxsize=4096)  # Each op call asks several times while JAX traces, and models repeat their layers.
def _shape_of(
    op: str, structure: Any, leaves: tuple[Any, ...], options: tuple[tuple[str, Any], ...], direction: str
) -> CallShape:
    call = OpCall(op, jax.tree.unflatten(structure, leaves), dict(options), direction)
    sizes, work = _array_sizes(call), work_of(call)
    traits = {name: _described(name, array) for name, array in call.arrays.items() if array is not None}
    for name, value in _options(call, sizes).items():
        if isinstance(value, int) and not isinstance(value, bool):
            sizes[name] = value
        elif trait := _trait(value):
            traits[name] = trait
    traits |= {f"{name} axis": "one" for name in _ROWS if sizes.get(name) == 1}
    return CallShape(
        op=call.op,
        traits=tuple(sorted(traits.items())),
        sizes=tuple(sorted(sizes.items())),
        flops=work.flops,
        traffic_bytes=work.traffic_bytes,
    )


def _array_sizes(call: OpCall) -> dict[str, int]:
    axes = dict(_AXES[call.op] if call.op in _AXES else _defined_axes(call))
    if call.op == "paged_attention":
        axes["key_pages"] = " ".join(_PAGE_AXES[axis] for axis in call.options["layout"])
    sizes: dict[str, int] = {}
    for name, names in axes.items():
        shape = list(_view(call.arrays[name])[0].shape)
        if call.op == "norm":
            shape.append(shape.pop(call.options["axis"]))
        named = names.split()
        if named[0].startswith("*"):
            leading = len(shape) - len(named) + 1
            shape = [math.prod(shape[:leading]), *shape[leading:]]
        sizes |= {axis.removeprefix("*"): size for axis, size in zip(named, shape, strict=True)}
    return sizes


def _defined_axes(call: OpCall) -> Mapping[str, str]:
    """The axes of an op that a plugin defines."""
    operands = op_named(call.op).axes(call).operands
    return {
        name: axes.replace("...", "*rows")
        for name, axes in operands.items()
        if isinstance(axes, str) and axes and call.arrays[name] is not None
    }


def _view(array: Any) -> tuple[Any, Any, Any, Any]:
    """(value, scale, zero point, codebook) of an array; all but the first are None where it is not quantized."""
    if not hasattr(type(array), "__stack_qview__"):
        return array, None, None, None

    def view(array: Any) -> Any:
        view = array.__stack_qview__()
        return view.qvalue, view.scale, view.zero_point, view.codebook

    return jax.eval_shape(view, array)


def _described(name: str, array: Any) -> str:
    """The dtype of an argument; how it is quantized; which axes of a bias or a mask are there."""
    if isinstance(array, tuple):
        return " ".join(_described(name, part) for part in array)
    value, scale, zero_point, codebook = _view(array)
    text = jnp.dtype(value.dtype).name
    if scale is None:
        return f"{text} {'x'.join('1' if size == 1 else 'n' for size in value.shape)}" if name in _BROADCAST else text
    pairs = zip(value.shape, scale.shape, strict=True)
    tiles = "x".join("all" if count == 1 else str(size // max(count, 1)) for size, count in pairs)
    zero_text = "" if zero_point is None else f", zero point {jnp.dtype(zero_point.dtype).name}"
    levels_text = "" if codebook is None else f", {codebook.size} levels"
    return f"{text}, scale {jnp.dtype(scale.dtype).name} {tiles}{zero_text}{levels_text}"


def _options(call: OpCall, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The options that may matter; tuples as their parts, integers that follow from the sizes as traits."""
    options: dict[str, Any] = {}
    for name, value in call.options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if isinstance(value, tuple):
            options |= {f"{name}[{place}]": "open" if part is None else part for place, part in enumerate(value)}
        else:
            options[name] = value
    if "query_offset" in options and options["query_offset"] == sizes["kv_seq"] - sizes["q_seq"]:
        options["query_offset"] = "end"
    if "rotary_dim" in options and options["rotary_dim"] == sizes["head_dim"]:
        options["rotary_dim"] = "all"
    if call.op == "norm":
        options["axis"] = "last" if call.options["axis"] == -1 else "inner"
    return options


def _trait(value: Any) -> str:
    """A word for an option, "" for one that is off."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if value is None or isinstance(value, bool | float):
        return "given" if value else ""
    return type(value).__name__
