"""The rows of a training step, plain and with a residual."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

KINDS = ("rms", "layer")


def _jnp(x: Any, scale: Any, *, kind: str) -> Any:
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def _tokamax(x: Any, scale: Any, *, kind: str) -> Any:
    import tokamax

    return tokamax.layer_norm(x, scale, None, epsilon=1e-6, subtract_mean=kind == "layer")


def _case(kind: str, dtype: str) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        return normal(rng, (2048, 512), dtype), normal(rng, (512,), dtype)

    contenders = {
        "stack": partial(ops.norm, kind=kind),
        "core": partial(ops.norm, kind=kind, implementation="reference"),
        "jnp": partial(_jnp, kind=kind),
        "tokamax": partial(_tokamax, kind=kind),
    }
    return Case(name=f"{kind}, 2048 x 512, {dtype}", operands=operands, contenders=contenders)


CASES = tuple(
    case
    for kind in KINDS
    for dtype in ("float32", "bfloat16")
    for case in forward_and_gradient(_case(kind, dtype), moving=(0, 1))
)
