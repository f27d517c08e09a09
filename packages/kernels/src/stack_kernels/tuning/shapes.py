"""Features of a call that its speed depends on: sizes, compared by distance, and traits, which must be equal.

Traits are dtypes, the set of arrays present, quantization and enabled options; option values that do not affect any
kernel's speed are excluded, such as `scale` or `theta`. Sizes are the op's axes under their own names, and integer
options such as the sides of a window.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.ops import OpCall
from stack_core.ops.defining import op_named
from stack_kernels.roofline import work_of

__all__ = ["CallShape", "bucket_of", "shape_of"]

# Arrays that determine an op's sizes, with their axes; "*rows" is the product of all leading axes.
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
    "state_space": {"query": "batch seq groups key_dim", "value": "batch seq heads value_dim"},
}
_PAGE_AXES = {"p": "pages", "h": "kv_heads", "s": "slots", "2": "pools", "d": "head_dim"}

# Products with a single row take other code paths than larger ones, on every kind of hardware.
_ROWS = ("rows", "q_seq")
_BROADCAST = ("bias", "mask")
_WITHOUT_EFFECT = ("ignore_index",)
_EXACT_UP_TO = 16


@dataclass(frozen=True)
class CallShape:
    """One kind of op call.

    Attributes:
      op: name of the op.
      traits: (name, value) pairs that must be equal, sorted.
      sizes: (name, value) pairs that may differ, sorted.
      flops: FLOPs of its products.
      traffic_bytes: bytes of its operands and results.
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
        """Returns the sum of |log2| of the size ratios: 3 for a ratio of eight.

        Infinite if the calls differ in anything but their sizes.
        """
        sizes, other_sizes = dict(self.sizes), dict(other.sizes)
        if (self.op, self.traits, sizes.keys()) != (other.op, other.traits, other_sizes.keys()):
            return math.inf
        return sum(_octaves(size, other_sizes[name]) for name, size in sizes.items())

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes)


def _octaves(size: int, other: int) -> float:
    """Returns |log2| of the ratio.

    Between sizes of opposite sign, as for query offsets, the path leads through zero.
    """
    if (size < 0) != (other < 0):
        return _octaves(abs(size), 0) + _octaves(abs(other), 0)
    # One more, because sizes and offsets may be 0.
    return abs(math.log2((abs(size) + 1) / (abs(other) + 1)))


def bucket_of(size: int) -> int:
    """Rounds to the nearest number of three significant bits; sizes up to 16 stay exact."""
    if size <= _EXACT_UP_TO:
        return size
    unit = 1 << (size.bit_length() - 3)
    return (size + unit // 2) // unit * unit


def shape_of(call: OpCall) -> CallShape:
    """Returns the shape of a call from its shapes, dtypes and options, which must be hashable."""
    leaves, structure = jax.tree.flatten(dict(call.arrays))
    return _shape_of(call.op, structure, tuple(leaves), tuple(call.options.items()), call.direction)


@functools.lru_cache(maxsize=4096)  # Each op call asks several times while JAX traces, and models repeat their layers.
def _shape_of(
    op: str, structure: Any, leaves: tuple[Any, ...], options: tuple[tuple[str, Any], ...], direction: str
) -> CallShape:
    call = OpCall(op, jax.tree.unflatten(structure, leaves), dict(options), direction)
    sizes, work = _array_sizes(call), work_of(call)
    traits = {name: _describe(name, array) for name, array in call.arrays.items() if array is not None}
    for name, value in _options(call, sizes).items():
        # A bool is an int in Python, and a trait here.
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
            # The axes are named with the normed one last.
            shape.append(shape.pop(call.options["axis"]))
        named = names.split()
        if named[0].startswith("*"):
            leading = len(shape) - len(named) + 1
            shape = [math.prod(shape[:leading]), *shape[leading:]]
        sizes |= {axis.removeprefix("*"): size for axis, size in zip(named, shape, strict=True)}
    return sizes


def _defined_axes(call: OpCall) -> Mapping[str, str]:
    """Returns the axes of an op defined by a plugin."""
    operands = op_named(call.op).axes(call).operands
    return {
        name: axes.replace("...", "*rows")
        for name, axes in operands.items()
        if isinstance(axes, str) and axes and call.arrays[name] is not None
    }


def _view(array: Any) -> tuple[Any, Any, Any, Any]:
    """Returns (value, scale, zero point, codebook) of an array; all but the first are None if it is not quantized."""
    if not hasattr(type(array), "__stack_qview__"):
        return array, None, None, None

    def view(array: Any) -> Any:
        view = array.__stack_qview__()
        return view.qvalue, view.scale, view.zero_point, view.codebook

    return jax.eval_shape(view, array)


def _describe(name: str, array: Any) -> str:
    """Describes an argument: its dtype, its quantization, and the non-trivial axes of a bias or a mask."""
    if isinstance(array, tuple):
        parts = [_describe(name, part) for part in array]
        return " ".join([*parts, "packed"] if isinstance(array, ops.PackedSegments) else parts)
    value, scale, zero_point, codebook = _view(array)
    text = jnp.dtype(value.dtype).name
    if scale is None:
        return f"{text} {'x'.join('1' if size == 1 else 'n' for size in value.shape)}" if name in _BROADCAST else text
    pairs = zip(value.shape, scale.shape, strict=True)
    # "all" and not the size: a scale per column is the same trait at every size.
    tiles = "x".join("all" if count == 1 else str(size // max(count, 1)) for size, count in pairs)
    zero_text = "" if zero_point is None else f", zero point {jnp.dtype(zero_point.dtype).name}"
    levels_text = "" if codebook is None else f", {codebook.size} levels"
    return f"{text}, scale {jnp.dtype(scale.dtype).name} {tiles}{zero_text}{levels_text}"


def _options(call: OpCall, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the options that may matter: tuples element by element; integers implied by the sizes become words."""
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
    """Returns a word for an option, "" if it is off."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if value is None or isinstance(value, bool | float):
        return "given" if value else ""
    return type(value).__name__
