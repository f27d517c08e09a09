"""`rope` on CPUs: the tables of cosines and sines are computed once, instead of for every head of every product.

XLA's CPU backend moves the computation of the tables into each loop that reads them, forward and backward; on jax 0.10
even past an optimization barrier. It moves nothing out of a loop.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import differentiated, rope_angles, rotated

__all__ = ["XLA_CPU"]


def _tables(positions: Any, *, theta: float, scaling: Any, rotary_dim: int) -> tuple[Any, Any]:
    """Returns cosines and sines [..., seq, 1, rotary_dim / 2] in fp32 for positions [..., seq]."""
    angles, factor = rope_angles(positions, theta=theta, scaling=scaling, rotary_dim=rotary_dim)
    # The loop is the barrier. A `cond` computes one function per turn, where a `where` would compute both.
    cosine, sine = lax.map(lambda is_sine: lax.cond(is_sine, jnp.sin, jnp.cos, angles), jnp.array([False, True]))
    return factor * cosine, factor * sine


def _rope(
    x: Any, positions: Any, *, interleaved: bool, requested: Any, **frequencies: Any
) -> tuple[Any, dict[str, Any]]:
    return rotated(x, *_tables(positions, **frequencies), interleaved=interleaved), {}


_forward, _backward = differentiated(_rope)

XLA_CPU = OpImplementation(op="rope", name="xla_cpu", forward=_forward, backward=_backward, platforms=("cpu",))
