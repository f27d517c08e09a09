"""`rope` on CPUs: the tables of cosines and sines are made once, and not again for every head of every product.

XLA's CPU backend moves what makes the tables into each loop that reads them, forward and backward, past an optimization
barrier too on jax 0.10. It moves nothing out of a loop.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.ops.building import rope_angles, rotated
from stack_kernels.cpu import on_cpu

__all__ = ["CPU"]


def _rope(x: Any, positions: Any, *, theta: float, scaling: Any, interleaved: bool, rotary_dim: int) -> Any:
    angles, factor = rope_angles(positions, theta=theta, scaling=scaling, rotary_dim=rotary_dim)
    cosine, sine = lax.map(lambda is_sine: lax.cond(is_sine, jnp.sin, jnp.cos, angles), jnp.array([False, True]))
    return rotated(x, factor * cosine, factor * sine, interleaved=interleaved)


CPU = OpImplementation(op="rope", name="cpu", function=_rope, supports=on_cpu, vjp=AUTODIFF)
