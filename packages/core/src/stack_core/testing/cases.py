"""Cases, suites and helpers for the contract suites of ops.

The calls are small and chosen to break kernels: sizes do not divide a tile, rows are empty, and every option is used at
least once. Kernels of accelerators refuse most of them, which are in fp32 or have 8 features, and have larger calls.
The oracles are written from the equations, without sharing code with the references. They run under `jax.enable_x64` on
float64 arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import QView

__all__ = ["OpCase", "OpSuite", "Quantized", "dense", "in_tiles", "integers", "spoiled"]


def _call(op: Callable[..., Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    return op(**arrays, **options)


@dataclass(frozen=True, eq=False)
class OpCase:
    """One call of an op.

    Attributes:
      op: name of the op.
      name: name of the case, unique in its suite.
      arrays: function that samples the array arguments by parameter name; float64 arrays are rounded to the dtype under
        test.
      options: other arguments.
      fixed: names of float arrays without a gradient.
      call: `(op, arrays, options) -> output`, for an op that needs a context such as a mesh. It may raise
        `unittest.SkipTest` with a missing requirement. The oracle is called without it.
    """

    op: str
    name: str
    arrays: Callable[[np.random.Generator], Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    call: Callable[..., Any] = _call


@dataclass(frozen=True)
class OpSuite:
    """The contract suite of an op.

    Attributes:
      cases: calls to check every implementation with.
      oracle: the op's definition in float64, called with the arrays and options of a case.
      for_accelerators: calls of sizes that kernels of accelerators support, checked in bf16 and fp16.
    """

    cases: tuple[OpCase, ...]
    oracle: Callable[..., Any]
    for_accelerators: tuple[OpCase, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantized array that core can access only through its `__stack_qview__`."""

    values: Any
    scales: Any
    zeros: Any = None
    codebook: Any = None

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.values, self.scales, self.zeros, "tiled", self.codebook)


def spoiled(case: OpCase, name: str, **places: tuple[Any, float]) -> OpCase:
    """Returns the case with NaN or infinity in some arrays.

    Outputs that depend on them are not finite; all others stay the same. Gradients are not compared, because
    implementations may differ in the entries that a 0 times NaN reaches.

    Args:
      places: (index, value) by the name of the array.
    """

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn = dict(case.arrays(rng))
        for array, (index, value) in places.items():
            drawn[array] = np.array(drawn[array])
            drawn[array][index] = value
        return drawn

    return dataclasses.replace(case, name=name, arrays=arrays, fixed=tuple(case.arrays(np.random.default_rng(0))))


def in_tiles(*cases: OpCase) -> tuple[OpCase, ...]:
    """Returns the cases for `OpSuite.for_accelerators`, with "tiles_" before their names, which stay unique."""
    return tuple(dataclasses.replace(case, name=f"tiles_{case.name}") for case in cases)


def dense(array: Any) -> Any:
    """Dequantizes an array to float64; returns any other array unchanged."""
    if not hasattr(type(array), "__stack_qview__"):
        return array
    view = array.__stack_qview__()
    tiles = np.ones(np.array(view.qvalue.shape) // np.array(view.scale.shape))
    value = view.qvalue if view.codebook is None else view.codebook[view.qvalue.astype(np.int32)]
    zero = 0.0 if view.zero_point is None else jnp.kron(view.zero_point.astype(np.float64), tiles)
    return (jax.lax.stop_gradient(value).astype(np.float64) - zero) * jnp.kron(view.scale.astype(np.float64), tiles)


def integers(*values: Any) -> np.ndarray:
    """Returns the arguments as an int32 array."""
    return np.array(values, np.int32)
