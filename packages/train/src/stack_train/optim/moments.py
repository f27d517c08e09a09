"""Moments in 16 or 8 bits between updates."""

from collections.abc import Callable, Container, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.nnx.traversals import unflatten_mapping
from jax.tree_util import GetAttrKey

from stack_core.abi.errors import ConfigError
from stack_train.optim.axes import AxesTree, is_matrix, map_axes

__all__ = ["MomentDtype", "MomentsState", "compress_moments", "round_stochastically"]

MomentDtype = Literal["float32", "bfloat16", "8bit"]

_LEVELS = 255.0  # codes of positive second moments; the code of 0 is 0
_OCTAVE = 8.0  # codes per factor of 2, so neighbors are 9% apart
_FLOAT8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(_FLOAT8).max)


class MomentsState(NamedTuple):
    """The state of `compress_moments`.

    Attributes:
      inner: state of the wrapped transformation; moments of matrices are bfloat16, or 8-bit codes.
      scales: with 8 bits, the float32 scales [..., 1] of the rows of each code, by its place among the leaves of
        `inner` and its parameter's path.
      count: int32 scalar, number of updates.
    """

    inner: Any
    scales: Any
    count: jax.Array


def compress_moments(
    inner: optax.GradientTransformation, dtype: MomentDtype, axes: AxesTree
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of matrices in fewer bits between updates, which are computed in float32.

    Moments are the fields `mu`, `trace` and `nu` of Optax's states. Those of norm scales and biases stay in float32.
    Rounding is stochastic and keeps the mean; otherwise a bfloat16 number would not move by less than 1/512 of itself.
    With 8 bits, a first moment is a float8 (e4m3) times a scale per row, the last axis. A second moment is one of 255
    values between the largest of its row and 2**-32 times that, 9% apart. Smaller positive values are rounded up: an
    update divided by the root is then too small, never too large. Source of scaled 8-bit states: Dettmers et al., 8-bit
    Optimizers via Block-wise Quantization, 2021 (arXiv:2110.02861), with blocks and rounding to nearest.

    Args:
      inner: the transformation.
      dtype: bfloat16 or 8bit.
      axes: logical axes of every parameter.

    Raises:
      ConfigError: when its state is initialized: it has no such moments.
    """
    extended = optax.with_extra_args_support(inner)
    of_matrices = {path for path, matrix in jax.tree.leaves_with_path(map_axes(is_matrix, axes)) if matrix}

    def init(params: Any) -> MomentsState:
        state = extended.init(params)
        if not any(_moments(state, of_matrices)):
            raise ConfigError(
                f"optimizer.moments is {dtype!r}, but this optimizer keeps no moments of matrices in fields `mu`, "
                "`trace` or `nu`. Leave it out."
            )
        return _compress(state, dtype, of_matrices, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MomentsState]:
        updates, inner_state = extended.update(updates, _decompress(state, of_matrices), params, **extra)
        done: Any = optax.safe_increment(state.count)
        return updates, _compress(inner_state, dtype, of_matrices, done)

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: jax.Array, *, key: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up with the probability (x - down) / (up - down).

    The upper half of a float32's bits is a bfloat16. A uniform number added to the lower half carries into the upper
    one with that probability.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    # Infinity lacks a neighbor above, and the noise could turn a NaN into infinity.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _compress(state: Any, dtype: MomentDtype, of_matrices: Container[Any], count: jax.Array) -> MomentsState:
    of_update = jax.random.fold_in(jax.random.key(0), count)
    leaves, structure = jax.tree.flatten(state)
    scales = {}
    for place, code, parameter in _moments(state, of_matrices):
        key = jax.random.fold_in(of_update, place)
        if dtype == "bfloat16":
            leaves[place] = round_stochastically(leaves[place], key=key)
        else:
            leaves[place], scale = code.encode(leaves[place], key)
            scales[str(place)] = unflatten_mapping({tuple(each.key for each in parameter): scale})
    return MomentsState(structure.unflatten(leaves), scales, count)


def _decompress(state: MomentsState, of_matrices: Container[Any]) -> Any:
    leaves, structure = jax.tree.flatten(state.inner)
    for place, code, _ in _moments(state.inner, of_matrices):
        if state.scales:
            (scale,) = jax.tree.leaves(state.scales[str(place)])
            leaves[place] = code.decode(leaves[place]) * scale
        else:
            leaves[place] = leaves[place].astype(jnp.float32)
    return structure.unflatten(leaves)


class _Code(NamedTuple):
    """Codes of 8 bits: `encode(x, key)` returns codes and the scale of each row, `decode(code)` the scaled values."""

    encode: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    decode: Callable[[jax.Array], jax.Array]


def _encode_first(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = _row_scale(jnp.abs(x)) / _LARGEST
    scaled = jnp.abs(x) / scale
    # A float32 without its mantissa is the power of two below. Float8 has 3 bits of mantissa and exponents from -6.
    exponent = jax.lax.bitcast_convert_type(scaled, jnp.uint32) & jnp.uint32(0x7F800000)
    step = jnp.maximum(jax.lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-6) / 8
    rounded = jnp.minimum(jnp.floor(scaled / step + _uniform(key, x.shape)) * step, _LARGEST)
    return jnp.copysign(rounded, x).astype(_FLOAT8), scale


def _encode_second(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = _row_scale(x)
    scaled = x / scale
    level = _LEVELS + jnp.log2(jnp.maximum(scaled, jnp.finfo(jnp.float32).tiny)) * _OCTAVE
    below = jnp.clip(jnp.floor(level), 1.0, _LEVELS - 1)
    low, high = _second_of(below), _second_of(below + 1)
    is_up = _uniform(key, x.shape) < (scaled - low) / (high - low)
    return jnp.where(x > 0, jnp.where(is_up, below + 1, below), 0.0).astype(jnp.uint8), scale


def _second_of(level: jax.Array) -> jax.Array:
    return jnp.where(level > 0, jnp.exp2((level - _LEVELS) / _OCTAVE), 0.0)


_CODES = {
    "mu": _Code(_encode_first, lambda code: code.astype(jnp.float32)),
    "trace": _Code(_encode_first, lambda code: code.astype(jnp.float32)),
    "nu": _Code(_encode_second, lambda code: _second_of(code.astype(jnp.float32))),
}


def _moments(state: Any, of_matrices: Container[Any]) -> Iterator[tuple[int, _Code, Any]]:
    """Yields the place among the leaves, the 8-bit code and the parameter's path of each moment of a matrix."""
    for place, (path, _) in enumerate(jax.tree.leaves_with_path(state)):
        for depth, key in enumerate(path):
            parameter = path[depth + 1 :]
            if isinstance(key, GetAttrKey) and key.name in _CODES and parameter in of_matrices:
                yield place, _CODES[key.name], parameter


def _row_scale(magnitudes: jax.Array) -> jax.Array:
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    return jnp.where(largest > 0, largest, 1.0)


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 uniform in [0, 1), of 16 bits."""
    return jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32) / 2**16
