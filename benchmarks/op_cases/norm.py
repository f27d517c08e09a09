"""A training step's rows and those of decoding; with the residual, peers add it themselves."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import TOLERANCES, Case, forward_and_gradient, normal
from stack_core import ops

SHAPES = ((4, 512, 512), (2, 1024, 4096), (8, 1, 4096))


def _jnp(x: Any, scale: Any, residual: Any = None, *, kind: str) -> Any:
    added = x if residual is None else x + residual
    wide = added.astype(jnp.promote_types(x.dtype, jnp.float32))
    if kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    result = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6) * scale
    return result.astype(x.dtype) if residual is None else (result.astype(x.dtype), added)


def _tokamax(x: Any, scale: Any, residual: Any = None, *, kind: str) -> Any:
    import tokamax

    added = x if residual is None else x + residual
    result = tokamax.layer_norm(added, scale, None, subtract_mean=kind == "layer")
    return result if residual is None else (result, added)


def _ours(x: Any, scale: Any, residual: Any = None, **options: Any) -> Any:
    return ops.norm(x, scale, residual=residual, **options)


def _case(shape: tuple[int, ...], dtype: str, kind: str, *, residual: bool) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        arrays = normal(rng, shape, dtype), normal(rng, shape[-1:], "float32")
        return (*arrays, normal(rng, shape, dtype)) if residual else arrays

    functions = {
        "stack": _ours,
        "core": partial(_ours, implementation="reference"),
        "jnp": _jnp,
        "tokamax": _tokamax,
    }
    what = f"{' x '.join(map(str, shape))}, {dtype}, {kind}{' with residual' if residual else ''}"
    return Case(
        name=what,
        operands=operands,
        contenders={name: partial(function, kind=kind) for name, function in functions.items()},
        tolerance=TOLERANCES[dtype],  # of the scale's gradient too, which is fp32
    )


CASES = tuple(
    case
    for shape in SHAPES
    for dtype in ("float32", "bfloat16")
    for kind, residual in (("rms", False), ("rms", True), ("layer", False))
    for case in forward_and_gradient(_case(shape, dtype, kind, residual=residual), moving=(0, 1, 2)[: 2 + residual])
)
