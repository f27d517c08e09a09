"""`linear_cross_entropy` on processors with AMX: `xla_cpu` with tiled products, fast enough to recompute logits."""

import functools
from typing import Any

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import differentiated
from stack_kernels.jit_cpu.linear.jit_amx import TILED, supports_tiles
from stack_kernels.linear_cross_entropy.xla_cpu import CONFIGS, linear_cross_entropy
from stack_kernels.supports import takes_no

__all__ = ["JIT_AMX"]


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    plain = takes_no(call, "bias", "softcap")
    return supports_tiles(call, chip, weights=("weight",), rows="hidden") if plain is True else plain


_forward, _backward = differentiated(functools.partial(linear_cross_entropy, TILED))

JIT_AMX = OpImplementation(
    op="linear_cross_entropy",
    name="jit_amx",
    forward=_forward,
    backward=_backward,
    platforms=("cpu",),
    supports=_supports,
    # The config that computes logits twice: in tiles this takes less time than keeping exponentials, and a fifth of the
    # memory of logits and softmax.
    default=lambda call, chip: CONFIGS[-1],
    space=lambda call, chip: (CONFIGS[-1], *CONFIGS[:-1]),
    residuals=(OWN,),
    is_opaque=True,
    exports=False,
    priority=3,
)
