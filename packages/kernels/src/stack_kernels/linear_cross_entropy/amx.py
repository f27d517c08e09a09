"""`linear_cross_entropy` on processors with AMX: `cpu`, its products in tiles, so fast that logits are formed again."""

import functools

from stack_core.abi import AUTODIFF, OpImplementation
from stack_kernels.linear.amx import TILED, supports_tiles
from stack_kernels.linear_cross_entropy.cpu import CONFIGS, linear_cross_entropy

__all__ = ["AMX"]

AMX = OpImplementation(
    op="linear_cross_entropy",
    name="amx",
    function=functools.partial(linear_cross_entropy, TILED),
    supports=functools.partial(supports_tiles, weights=("weight",), rows="hidden"),
    vjp=AUTODIFF,
    configs=(CONFIGS[-1], *CONFIGS[:-1]),
    priority=3,
)
