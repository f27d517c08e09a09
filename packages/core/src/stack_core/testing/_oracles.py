"""Dense float64 definitions of the ops: what every implementation is measured against.

They are written from the equations, without sharing code with the references, and run under `jax.enable_x64`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ORACLES"]


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    sinks: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    **masking: Any,
) -> Any:
    batch, q_seq, heads, head_dim = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    allowed = _allowed((batch, heads, q_seq, key.shape[1]), **masking)
    sink_weight = jnp.zeros(heads) if sinks is None else jnp.exp(sinks)
    weights = jnp.where(allowed, jnp.exp(scores), 0.0)
    denominator = jnp.sum(weights, axis=-1) + sink_weight[None, :, None]
    empty = denominator == 0
    safe = jnp.where(empty, 1.0, denominator)
    output = jnp.einsum("bhqk,bkhd->bqhd", weights / safe[..., None], value)
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe)).swapaxes(1, 2)
    return (output, lse) if return_lse else output


def _allowed(
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    query_offset: Any = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    segment_ids: Any = None,
    kv_lengths: Any = None,
) -> np.ndarray:
    """The definition, one (row, head, query, key) at a time."""
    batch, _, q_seq, kv_seq = shape
    left, right = window or (None, None)
    offsets = np.broadcast_to(kv_seq - q_seq if query_offset is None else query_offset, batch)
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    q_segments, kv_segments = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for row, _, i, j in np.ndindex(shape):
        place = i + offsets[row]
        forbidden = (
            (causal and j > place)
            or (left is not None and j < place - left)
            or (right is not None and j > place + right)
            or (kv_lengths is not None and j >= kv_lengths[row])
            or (segment_ids is not None and q_segments[row, i] != kv_segments[row, j])
        )
        if forbidden:
            allowed[row, :, i, j] = False
    return allowed


def _linear(x: Any, weight: Any, *, bias: Any = None, preferred_dtype: Any = None) -> Any:
    product = jnp.einsum("...i,io->...o", x, _dense(weight))
    return product if bias is None else product + bias


def _dense(weight: Any) -> Any:
    if not hasattr(type(weight), "__stack_qview__"):
        return weight
    view = weight.__stack_qview__()
    tiles = np.array(view.qvalue.shape) // np.array(view.scale.shape)
    scale = np.kron(np.asarray(view.scale, np.float64), np.ones(tiles))
    zero = 0.0 if view.zero_point is None else np.kron(np.asarray(view.zero_point, np.float64), np.ones(tiles))
    return jnp.asarray((np.asarray(view.qvalue, np.float64) - zero) * scale)


_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "relu_squared": lambda x: jnp.where(x > 0, x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}


def _gated_linear_unit(x: Any, w_gate: Any, w_up: Any, *, activation: str = "silu") -> Any:
    return _ACTIVATIONS[activation](x @ _dense(w_gate)) * (x @ _dense(w_up))


def _norm(
    x: Any,
    scale: Any = None,
    *,
    offset: Any = None,
    kind: str = "rms",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Any = None,
    axis: int = -1,
) -> Any:
    total = x if residual is None else x + residual
    moved = jnp.moveaxis(total, axis, -1)
    centred = moved - (moved.mean(-1, keepdims=True) if kind == "layer" else 0.0)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normed = normed * (1.0 if scale is None else scale + scale_offset) + (0.0 if offset is None else offset)
    normed = jnp.moveaxis(normed, -1, axis)
    return normed if residual is None else (normed, total)


def _rope(
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
        frequencies, factor = scaling.frequencies(theta, rotary_dim, jnp.asarray(positions))
    angles = np.asarray(positions)[..., None, None] * np.asarray(frequencies, np.float64)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = turning.reshape(*x.shape[:-1], *((rotary_dim // 2, 2) if interleaved else (2, rotary_dim // 2)))
    axis = -1 if interleaved else -2
    real, imaginary = (jnp.take(pairs, index, axis=axis) for index in (0, 1))
    turned = (real + 1j * imaginary) * factor * np.exp(1j * angles)
    joined = jnp.stack([turned.real, turned.imag], axis=axis).reshape(turning.shape)
    return jnp.concatenate([joined, rest], axis=-1)


def _linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Any:
    logits = hidden @ weight
    vocab = logits.shape[-1]
    log_partition = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    target = (1 - label_smoothing) * (np.asarray(labels)[..., None] == np.arange(vocab)) + label_smoothing / vocab
    losses = log_partition - jnp.sum(target * logits, axis=-1) + z_loss * log_partition**2
    counted = np.asarray(labels) != ignore_index
    losses = jnp.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (max(counted.sum(), 1) if reduction == "mean" else 1)


ORACLES: Mapping[str, Callable[..., Any]] = {
    "attention": _attention,
    "gated_linear_unit": _gated_linear_unit,
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "norm": _norm,
    "rope": _rope,
}
