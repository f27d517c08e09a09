"""The contract suite of `rope`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.testing.cases import OpCase, OpSuite, in_tiles, spoiled

__all__ = ["SUITE"]


def _rope_case(name: str, x: tuple[int, ...] = (2, 9, 3, 16), start: int = 0, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"x": rng.normal(size=x), "positions": rng.integers(start, start + 64, size=x[:-2]).astype(np.int32)}

    return OpCase("rope", name, arrays, options)


_CASES = (
    _rope_case("plain"),
    _rope_case("interleaved", interleaved=True),
    _rope_case("partial", rotary_dim=6),
    _rope_case("partial_interleaved", rotary_dim=6, interleaved=True, theta=500.0),
    _rope_case("one_token", x=(1, 1, 1, 2)),
    _rope_case("empty_rows", x=(2, 0, 3, 8)),
    _rope_case("later_positions", start=300, theta=500_000.0),
    _rope_case("linear_scaling", scaling=ops.LinearScaling(factor=4.0)),
    _rope_case("dynamic_scaling", scaling=ops.DynamicScaling(factor=2.0, max_position_embeddings=16)),
    spoiled(_rope_case(""), "not_a_number", x=((0, 3, 1, 4), np.nan)),
)

_FOR_ACCELERATORS = in_tiles(
    _rope_case("heads_of_64", x=(2, 64, 4, 64)),
    _rope_case("heads_of_128", x=(1, 67, 2, 128), start=4000),
    _rope_case("interleaved_heads_of_128", x=(1, 64, 2, 128), interleaved=True),
    _rope_case("half_of_each_head", x=(1, 64, 2, 128), rotary_dim=64),
)


def _oracle(
    x: Any,
    positions: Any,
    *,
    theta: float = 10_000.0,
    scaling: Any = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> Any:
    rotary_dim = rotary_dim or x.shape[-1]
    frequencies, factor = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim), 1.0
    if scaling is not None:
        with jax.ensure_compile_time_eval():  # positions are constants
            frequencies, factor = scaling.frequencies(theta, rotary_dim, jnp.asarray(positions))
    angles = np.asarray(positions)[..., None, None] * np.asarray(frequencies, np.float64)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = turning.reshape(*x.shape[:-1], *((rotary_dim // 2, 2) if interleaved else (2, rotary_dim // 2)))
    axis = -1 if interleaved else -2
    real, imaginary = (jnp.take(pairs, index, axis=axis) for index in (0, 1))
    turned = (real + 1j * imaginary) * factor * np.exp(1j * angles)
    joined = jnp.stack([turned.real, turned.imag], axis=axis).reshape(turning.shape)
    return jnp.concatenate([joined, rest], axis=-1)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
