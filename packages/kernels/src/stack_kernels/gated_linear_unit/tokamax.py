"""`gated_linear_unit` on Hopper and Blackwell: Tokamax's Mosaic-GPU kernel, forward only.

The kernel takes both weights as one array, [d_in, 2, d_out], so they are copied into one for each call. If the weights
are large in relation to the rows, the copy costs more than the kernel saves; therefore it runs only if named or
measured as fastest. Rows are padded to tiles. Other implementations compute the gradient, since Tokamax's is XLA's.
"""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import ACTIVATIONS, is_quantized
from stack_kernels import from_tokamax
from stack_kernels.supports import first_problem, is_beyond, takes_no, unquantized

__all__ = ["TOKAMAX", "GateTile"]

_PLACE = "tokamax._src.ops.gated_linear_unit.pallas_mosaic_gpu"
_DTYPES = ("bfloat16", "float16")
_ACTIVATIONS = {name: ACTIVATIONS[name] for name in ("silu", "sigmoid", "gelu_tanh")} | {
    "relu": lambda x: jnp.maximum(x, 0)  # without the derivative rule of `jax.nn.relu`, which Mosaic-GPU rejects
}
_D_IN, _D_OUT = 64, 128  # multiples


@dataclass(frozen=True)
class GateTile:
    """Rows, d_in and d_out of a tile, and the number of prefetched tiles."""

    rows: int
    d_in: int
    d_out: int
    stages: int


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if (plain := unquantized(call, chip)) is not True:
        return plain
    if (refusal := takes_no(call, "bias_gate", "bias_up", "limit")) is not True:
        return refusal
    x, weight, options = call.arrays["x"], call.arrays["w_gate"], call.options
    generation, absent = from_tokamax.GENERATIONS.get(chip.kind.partition("-")[0].lower()), from_tokamax.missing()
    problems = {
        f"it is for h100, h200 and b200, not {chip.kind}": generation not in ("sm90", "sm100"),
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
        f"its activations are {', '.join(_ACTIVATIONS)}, not {options['activation']!r}": options["activation"]
        not in _ACTIVATIONS,
        "it adds nothing to the second product": options["up_offset"] != 0,
        f"d_in is a multiple of {_D_IN} and d_out of {_D_OUT}": any(
            (weight.shape[0] % _D_IN, math.prod(weight.shape[1:]) % _D_OUT)
        ),
        f"{config} does not fit the call": is_beyond(config, _space(call, chip)),
        str(absent): absent is not None,
    }
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[GateTile]:
    if is_quantized(call.arrays["w_gate"]):
        return
    for d_in in (64, 128):
        if call.arrays["x"].shape[-1] % d_in == 0:
            yield from (GateTile(128, d_in, 64, stages) for stages in (4, 2))


def _forward(
    *, x: Any, w_gate: Any, w_up: Any, activation: str, requested: frozenset[str], config: GateTile, **unused: Any
) -> tuple[Any, dict[str, Any]]:
    del requested, unused
    library = importlib.import_module(_PLACE)
    rows = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(rows, ((0, -len(rows) % config.rows), (0, 0)))

    def product(rows: Any, w_gate: Any, w_up: Any) -> Any:
        tiles = library.Config(
            tile_m=config.rows, tile_n=config.d_out, tile_k=config.d_in, num_stages=config.stages, epi_tile_n=None
        )
        op = library.PallasMosaicGpuGatedLinearUnit()
        return from_tokamax.run(op, tiles, rows, (w_gate, w_up), activation=_ACTIVATIONS[activation])[0]

    found = from_tokamax.on_arrays(product, padded, w_gate, w_up)[: len(rows)]
    return found.reshape(*x.shape[:-1], math.prod(w_gate.shape[1:])), {}


TOKAMAX = OpImplementation(
    "gated_linear_unit",
    "tokamax",
    _forward,
    platforms=("gpu",),
    supports=_supports,
    default=lambda call, chip: next(_space(call, chip), None),
    space=_space,
    is_opaque=True,
    exports=False,
    priority=-1,
)
