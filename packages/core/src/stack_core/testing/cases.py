"""What the contract suites of ops are made of.

The calls are small and chosen to break kernels: sizes do not divide a tile, rows are empty, every option is given at
least once. The oracles are written from the equations, without sharing code with the references; they run under
`jax.enable_x64` on float64 arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.ops import QView

__all__ = ["OpCase", "OpSuite", "Quantized", "dense", "integers", "spoiled"]


def _call(op: Callable[..., Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    return op(**arrays, **options)


@dataclass(frozen=True, eq=False)
class OpCase:
    """One call of an op.

    Attributes:
      arrays: draws the array arguments by parameter name; float64 arrays are rounded to the dtype under test.
      options: the other arguments.
      fixed: names of float arrays that no gradient is asked of.
      call: `(op, arrays, options) -> output`, for an op that needs something around it; may raise `unittest.SkipTest`
        with what is missing. The oracle is called without it.
    """

    op: str
    name: str
    arrays: Callable[[np.random.Generator], Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    call: Callable[..., Any] = _call


@dataclass(frozen=True)
class OpSuite:
    """The calls that an op's implementations are tried with.

    Attributes:
      oracle: the op's definition in float64, called with the arrays and options of a case.
    """

    cases: tuple[OpCase, ...]
    oracle: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A quantized array that core knows nothing of but its `__stack_qview__`."""

    values: Any
    scales: Any
    zeros: Any = None
    codebook: Any = None

    def __stack_qview__(self) -> QView:
        return QView((1, 0), self.values, self.scales, self.zeros, "tiled", self.codebook)


def spoiled(case: OpCase, name: str, **places: tuple[Any, float]) -> OpCase:
    """The call with NaN or infinity in some arrays, each given by an index and the value there.

    What depends on them is no finite number, and nothing else changes. No gradient is compared: which of its entries a
    0 times NaN reaches is up to the implementation.
    """

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn = dict(case.arrays(rng))
        for array, (index, value) in places.items():
            drawn[array] = np.array(drawn[array])
            drawn[array][index] = value
        return drawn

    return dataclasses.replace(case, name=name, arrays=arrays, fixed=tuple(case.arrays(np.random.default_rng(0))))


def dense(array: Any) -> Any:
    """What a quantized array stands for, in float64; any other array itself."""
    if not hasattr(type(array), "__stack_qview__"):
        return array
    view = array.__stack_qview__()
    tiles = np.ones(np.array(view.qvalue.shape) // np.array(view.scale.shape))
    value = view.qvalue if view.codebook is None else view.codebook[view.qvalue.astype(np.int32)]
    zero = 0.0 if view.zero_point is None else jnp.kron(view.zero_point.astype(np.float64), tiles)
    return (jax.lax.stop_gradient(value).astype(np.float64) - zero) * jnp.kron(view.scale.astype(np.float64), tiles)


def integers(*values: Any) -> np.ndarray:
    """Its arguments as an int32 array."""
    return np.array(values, np.int32)
