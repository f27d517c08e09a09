"""FLOP counts of functions, derived from their jaxprs: no compilation, no hardware, no formula per model.

Matrix products and convolutions are counted, with a multiply-add as two FLOPs. Elementwise operations, reductions and
matrix decompositions are not, which is the convention of published MFU figures. Multiplications by the zeros of a
convolution's padding and dilation do not count either, as in XLA's cost analysis.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.chips import Chip
from stack_core.chips.jit_context import JitContext

__all__ = [
    "Flops",
    "count_flops",
    "inner_jaxprs",
    "model_flops_per_call",
    "model_flops_per_step",
    "references_only",
    "valid_pairs",
]

references_only: Final[JitContext[bool]] = JitContext()
"""While it is True, the references of the ops compute all calls that are traced, because their FLOPs can be counted."""


@dataclass(frozen=True)
class Flops:
    """FLOP counts by operand dtype; by the wider one if the operands differ.

    Attributes:
      by_dtype: FLOPs by dtype name, such as {"bfloat16": 1024}.
      uncounted: descriptions of kernels whose products are not visible, and of loops whose trip count is only known at
        run time, one line each. `count_flops` leaves their FLOPs out; `executed_flops` counts one trip of a loop.
    """

    by_dtype: Mapping[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.by_dtype.values())

    def __add__(self, other: "Flops") -> "Flops":
        dtypes = {**self.by_dtype, **other.by_dtype}
        sums = {dtype: self.by_dtype.get(dtype, 0) + other.by_dtype.get(dtype, 0) for dtype in dtypes}
        return Flops(sums, self.uncounted + other.uncounted)

    def __mul__(self, times: int) -> "Flops":
        # A loop that never runs has neither FLOPs nor loops of unknown length.
        if times == 0:
            return Flops()
        return Flops({dtype: flops * times for dtype, flops in self.by_dtype.items()}, self.uncounted)

    def ideal_s(self, chip: Chip, *, units: int = 1) -> float | None:
        """Computes the time in seconds at the peak rate of `units` units of the chip.

        Returns:
          None for a dtype without a peak rate, or for loops without a trip count.
        """
        if self.uncounted or not self.by_dtype.keys() <= chip.peak_flops.keys():
            return None
        return sum((flops / (chip.peak_flops[dtype] * units) for dtype, flops in self.by_dtype.items()), 0.0)


def count_flops(function: Callable[..., Any], *args: Any) -> Flops:
    """Counts the FLOPs of one call, summed over all devices that run it.

    A scan counts its body once per iteration, a `cond` its most expensive branch, and a Pallas kernel its body once per
    grid cell. Recomputation by `jax.checkpoint` in a backward pass counts again. A foreign function counts its
    attribute `flops`, under the dtype in its attribute `flops_dtype`. A Pallas kernel with a dynamic grid counts its
    `cost_estimate` if its products have a single dtype. The trip count of a `while` loop is not guessed: the loop is
    listed in `Flops.uncounted`, unless it does no FLOPs. So are the kernels of cuDNN, Triton and Mosaic GPU.

    Args:
      args: arrays, or pytrees of anything with a shape and a dtype.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*args))


def model_flops_per_step(loss: Callable[..., Any], *args: Any) -> Flops:
    """Counts the model FLOPs of a training step, the numerator of MFU.

    They are three times the FLOPs of the forward pass `loss(*args)`, because each product has one derivative of equal
    cost per operand. Rematerialization is left out. Attention counts every pair of positions that the forward pass
    computes, masked or not (PaLM, https://arxiv.org/abs/2204.02311, appendix B).

    Args:
      args: arguments of `loss` for one full batch, as for `count_flops`.
    """
    return model_flops_per_call(loss, *args) * 3


def model_flops_per_call(function: Callable[..., Any], *args: Any) -> Flops:
    """Counts the FLOPs of one call as `count_flops` does, or of the ops' references if some of it is not counted."""
    found = count_flops(function, *args)
    # Also for loops: a kernel may loop over as many tiles as the groups of its operands need.
    if found.uncounted:
        with references_only(True):
            found = count_flops(function, *args)
    return found


def _jaxpr_flops(jaxpr: Any) -> Flops:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or open: JAX 0.11 merged the two classes
    return sum((_equation_flops(equation) for equation in jaxpr.eqns), Flops())


def _equation_flops(equation: Any) -> Flops:
    name = equation.primitive.name
    count = _COUNTS.get(name)
    if count is not None:
        return count(equation)
    if name.startswith(_KERNELS):
        return Flops({}, (f"kernel {name}, whose products are not visible",))
    return sum((_jaxpr_flops(inner) for inner in inner_jaxprs(equation.params.values())), Flops())


def inner_jaxprs(values: Any) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation, including jaxprs in lists."""
    for value in values:
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from inner_jaxprs(value)


def _product(flops: int, *operands: Any) -> Flops:
    dtype = max((operand.aval.dtype for operand in operands), key=lambda dtype: dtype.itemsize)
    return Flops({jnp.dtype(dtype).name: flops} if flops else {})


def _dot_general(equation: Any) -> Flops:
    """Counts 2 * size of the result * sizes of the contracted axes."""
    left, right = equation.invars
    (contracted, _), _ = equation.params["dimension_numbers"]
    summed = math.prod(left.aval.shape[axis] for axis in contracted)
    return _product(2 * math.prod(equation.outvars[0].aval.shape) * summed, left, right)


def _ragged_dot_general(equation: Any) -> Flops:
    """Counts 2 * size of the left operand * sizes of the right operand's own axes.

    The number of groups is no factor, because each row of the left operand belongs to one group.
    """
    left, right = equation.invars[:2]
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    own = math.prod(size for axis, size in enumerate(right.aval.shape) if axis not in shared)
    return _product(2 * math.prod(left.aval.shape) * own, left, right)


def _convolution(equation: Any) -> Flops:
    """Counts 2 * batch * output features * input features per group * `valid_pairs` of every spatial axis."""
    left, right = equation.invars
    params = equation.params
    left_axes, right_axes, out_axes = params["dimension_numbers"]
    left_shape, right_shape, out_shape = left.aval.shape, right.aval.shape, equation.outvars[0].aval.shape
    pairs = [
        valid_pairs(
            left_shape[left_axes[2 + axis]],
            right_shape[right_axes[2 + axis]],
            out_shape[out_axes[2 + axis]],
            stride=params["window_strides"][axis],
            # The padding behind the last input only changes the number of outputs.
            padding=params["padding"][axis][0],
            dilations=(params["lhs_dilation"][axis], params["rhs_dilation"][axis]),
        )
        for axis in range(len(out_axes) - 2)
    ]
    channels = out_shape[out_axes[0]] * out_shape[out_axes[1]] * right_shape[right_axes[1]]
    return _product(2 * channels * math.prod(pairs), left, right)


def valid_pairs(size: int, kernel: int, out: int, *, stride: int, padding: int, dilations: tuple[int, int]) -> int:
    """Counts the (output, kernel element) pairs along one axis that read an input, not padding or a dilation hole.

    Args:
      size: number of inputs.
      kernel: number of kernel elements.
      out: number of outputs.
      stride: inputs (holes included) between neighbouring outputs.
      padding: zeros before the first input.
      dilations: (input dilation, kernel dilation).
    """
    input_dilation, kernel_dilation = dilations
    place = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * kernel_dilation - padding
    return int(np.sum((place >= 0) & (place < (size - 1) * input_dilation + 1) & (place % input_dilation == 0)))


def _foreign_call(equation: Any) -> Flops:
    attributes = dict(equation.params["attributes"])
    return Flops({attributes["flops_dtype"]: int(attributes["flops"])} if "flops" in attributes else {})


def _scan(equation: Any) -> Flops:
    return _jaxpr_flops(equation.params["jaxpr"]) * equation.params["length"]


def _while(equation: Any) -> Flops:
    trip = _jaxpr_flops(equation.params["cond_jaxpr"]) + _jaxpr_flops(equation.params["body_jaxpr"])
    return Flops({}, _uncounted("while loop", trip))


def _uncounted(label: str, trip: Flops) -> tuple[str, ...]:
    line = (f"{label} of {trip.total} FLOPs per trip, unknown trip count",) if trip.total else ()
    return line + trip.uncounted


def _cond(equation: Any) -> Flops:
    branches = [_jaxpr_flops(branch) for branch in equation.params["branches"]]
    # Any branch may run, so the loops of all branches count as unknown.
    uncounted = tuple(line for branch in branches for line in branch.uncounted)
    return Flops(max(branches, key=lambda branch: branch.total).by_dtype, uncounted)


def _shard_map(equation: Any) -> Flops:
    """Multiplies the FLOPs of the body, which has per-device shapes, by the devices along its newly manual axes."""
    mesh = equation.params["mesh"]
    devices = math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])
    return _jaxpr_flops(equation.params["jaxpr"]) * devices


def _pallas_call(equation: Any) -> Flops:
    cell = _jaxpr_flops(equation.params["jaxpr"])
    grid = equation.params["grid_mapping"].grid
    if all(isinstance(size, int) for size in grid):
        return cell * math.prod(grid)
    estimate = equation.params["cost_estimate"]
    if estimate is not None and len(cell.by_dtype) == 1:
        return Flops(dict.fromkeys(cell.by_dtype, estimate.flops), cell.uncounted)
    return Flops({}, _uncounted("Pallas kernel with a dynamic grid", cell))


def _linear_solve(equation: Any) -> Flops:
    """Counts only the solver; the other jaxprs define derivatives."""
    return _jaxpr_flops(equation.params["jaxprs"].solve)


# Prefixes of primitives that launch a kernel: of Pallas for Mosaic GPU, of jax-triton, and of cuDNN in `jax.nn`.
_KERNELS = ("mpmd_map", "triton_kernel_call", "dot_product_attention")

_COUNTS: Mapping[str, Callable[[Any], Flops]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "conv_general_dilated": _convolution,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas_call,
    "ffi_call": _foreign_call,
    "custom_linear_solve": _linear_solve,
}
