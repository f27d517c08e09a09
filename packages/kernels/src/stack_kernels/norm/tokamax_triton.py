"""`norm` on NVIDIA GPUs: Tokamax's Triton kernels, forward and backward, for rms and layer norms along any axis.

The kernels have no residual sum: it is computed before, and XLA fuses it with the operations that produce its operands.
The backward pass reads the saved reciprocal root mean square; for a layer norm it recomputes the mean.
"""

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward
from stack_kernels import from_tokamax
from stack_kernels.supports import first_problem

__all__ = ["TOKAMAX_TRITON", "NormBlock"]

_PLACE = "tokamax._src.ops.normalization.triton"
_DTYPES = ("bfloat16", "float16", "float32")
_NUMBERS = 16_384  # numbers per block, in registers: a quarter of a core's
_MAX_NUMBERS = 65_536
_WARPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class NormBlock:
    """Size of a block, in powers of two.

    Attributes:
      rows: rows along the axes before the normed one.
      columns: columns along the axes after the normed one; 1 for the last axis.
      warps: warps per block.
    """

    rows: int
    columns: int
    warps: int


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    x, generation = call.arrays["x"], from_tokamax.GENERATIONS.get(chip.kind.partition("-")[0].lower())
    absent = from_tokamax.missing("jax_triton", "triton")
    problems = {
        f"it is for a100, h100, h200 and b200, not {chip.kind}": generation is None,
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
        "a row does not fit into registers": not list(_space(call, chip)),
        f"{config} does not fit into registers": config is not None and _numbers(call, config) > _max_numbers(call),
    }
    if call.direction == "backward":
        problems[f"{call.forward!r} hands it no inverse_rms"] = "inverse_rms" not in call.residuals
    problems[str(absent)] = absent is not None
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[NormBlock]:
    x, axis = call.arrays["x"], call.options["axis"]
    size, rows = _power(x.shape[axis]), math.prod(x.shape[:axis])
    after = math.prod(x.shape[axis:][1:])
    columns = 1 if after == 1 else min(_power(after), 16)
    if size * columns > _max_numbers(call):
        return
    max_rows = max(min(_NUMBERS // (size * columns), _power(rows), 8), 1)
    warps = min(max(size * columns // 1024, 1), 8)
    for of_block in (1, max_rows):
        yield from (NormBlock(of_block, columns, each) for each in sorted(_WARPS, key=lambda each: abs(each - warps)))


def _max_numbers(call: OpCall) -> int:
    return _MAX_NUMBERS if call.direction == "forward" else _MAX_NUMBERS // 2


def _numbers(call: OpCall, block: NormBlock) -> int:
    return block.rows * _power(call.arrays["x"].shape[call.options["axis"]]) * block.columns


def _power(size: int) -> int:
    """Returns the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def _forward(
    *, x: Any, scale: Any, offset: Any, residual: Any, requested: frozenset[str], config: NormBlock, **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    library = importlib.import_module(_PLACE)
    total = x if residual is None else x + residual

    def normed(x: Any, scale: Any, offset: Any) -> Any:
        # With an alias the result would overwrite x, which the backward pass reads.
        op = library.TritonNormalization(input_output_alias=False)
        y, (_, inverse) = from_tokamax.run(
            op, _config(library, config), x, scale, offset, **_options(options), return_residuals=True
        )
        return y, inverse

    y, inverse = from_tokamax.on_arrays(normed, total, scale, offset)
    residuals = {"inverse_rms": inverse} if "inverse_rms" in requested else {}
    return (y if residual is None else (y, total)), residuals


@as_backward
def _backward(call: BackwardCall, *, config: NormBlock) -> Mapping[str, Any]:
    library = importlib.import_module(_PLACE)
    arrays, options, cotangents = call.arrays, call.options, call.cotangents
    has_sum = arrays["residual"] is not None
    total = call.outputs[1] if has_sum else arrays["x"]
    of_y = cotangents[0] if has_sum else cotangents
    mean = None
    if options["kind"] == "layer":
        mean = jnp.mean(total.astype(jnp.float32), axis=options["axis"], keepdims=True)

    def gradients(mean: Any, inverse: Any, of_y: Any, x: Any, scale: Any, offset: Any) -> Any:
        def of_one(of_y: Any) -> Any:
            residuals, unread = (mean, inverse), of_y  # in place of the output, which it does not read
            op, blocks = library.TritonNormalizationVjp(), _config(library, config, of_gradient=True)
            return from_tokamax.run(op, blocks, residuals, unread, of_y, x, scale, offset, **_options(options))[0]

        # The kernel overwrites x in a way that JAX cannot track if x is shared with other derivatives, except when
        # mapped over several cotangents of one x. Hence the `vmap` over a single cotangent.
        found = jax.tree.map(lambda each: each[0], jax.vmap(of_one)(of_y[None]))
        return {name: one for name, one in zip(("x", "scale", "offset"), found, strict=True) if one is not None}

    operands = (mean, call.residuals["inverse_rms"], of_y, total, arrays["scale"], arrays["offset"])
    found = dict(from_tokamax.on_arrays(gradients, *operands))
    if has_sum:
        found["x"] = found["x"] + cotangents[1]
        found["residual"] = found["x"]
    return found


def _config(library: Any, config: NormBlock, *, of_gradient: bool = False) -> Any:
    made = (library.triton_vjp_config if of_gradient else library.triton_config).Config
    return made(block_m=config.rows, block_n=None if config.columns == 1 else config.columns, num_warps=config.warps)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "axis": options["axis"],
        "epsilon": options["epsilon"],
        "scale_offset": options["scale_offset"],
        "subtract_mean": options["kind"] == "layer",
    }


TOKAMAX_TRITON = OpImplementation(
    "norm",
    "tokamax_triton",
    _forward,
    _backward,
    platforms=("gpu",),
    supports=_supports,
    default=lambda call, chip: next(_space(call, chip), None),
    space=_space,
    residuals=("inverse_rms",),
    is_opaque=True,
    exports=False,
    priority=2,
)
