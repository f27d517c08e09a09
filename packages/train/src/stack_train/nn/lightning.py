"""Lightning attention: linear attention with a fixed decay per head and layer.

Source: Qin et al., Lightning Attention-2, 2024 (arXiv:2401.04658), in the variant of MiniMax-01 (arXiv:2501.08313).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from stack_core import ops
from stack_core.abi.caches import KVCache, Recurrent
from stack_train.nn.build import Build
from stack_train.nn.context import sharing_devices
from stack_train.nn.residual import Hidden, Norm, Rows
from stack_train.nn.shared_recurrence import from_blocks, states_before, to_blocks, tokens_before
from stack_train.nn.short_convolution import segment_starts

__all__ = ["LightningAttention", "LightningMixer", "recur"]

_HEADS = ("batch", "seq", "act_heads", None)
_AXES = {**dict.fromkeys(("query", "key", "value"), _HEADS), **dict.fromkeys(("decay", "beta"), _HEADS[:3])}
_AXES |= {"initial_state": ("batch", "act_heads", None, None)}
# As in transformers, which does not use the epsilon of the config here.
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class LightningAttention:
    """Lightning attention, y = (norm(o) * sigmoid(x Z)) O, with o of `recur`.

    q, k and v are silu(x W), without positions. The norm is an RMS norm of all heads together. Head h (from 1) of
    layer l (from 0) decays by exp(-r) per token,

        r = 2^(-8 h / heads) (1 - l / (layers - 1 + 1e-5) + 1e-5)

    Attributes:
      heads: number of heads.
      head_dim: width of a head.
      layers: number of layers of the model.
    """

    heads: int
    head_dim: int
    layers: int

    @property
    def rates(self) -> np.ndarray:
        """Decay rates r, fp32[layers, heads]."""
        slopes = 2.0 ** (-8 * np.arange(1, self.heads + 1) / self.heads)
        # In float64, because the factor of the last layer is a small difference.
        depths = np.arange(self.layers)[:, None] / (self.layers - 1 + 1e-5)
        return (slopes * (1 - depths + 1e-5)).astype(np.float32)

    def build(self, build: Build) -> "LightningMixer":
        return LightningMixer(self, build)

    def state(self, repeats: int, dtype: str) -> Recurrent:
        del dtype
        # The state sums over all tokens of a sequence, so it is float32 in any cache.
        return Recurrent(repeats=repeats, shapes=((self.heads, self.head_dim, self.head_dim),), dtypes=("float32",))


class LightningMixer(nnx.Module):
    """Module of a `LightningAttention`. Query, key and value of a head are adjacent in the first projection."""

    def __init__(self, spec: LightningAttention, build: Build) -> None:
        inner = spec.heads * spec.head_dim
        self.spec, self.norm_spec = spec, Norm(epsilon=_NORM_EPSILON, offset=build.norm.offset)
        self.query_key_value = build.linear((build.embed, 3 * inner), ("embed", "heads"))
        self.gate = build.linear((build.embed, inner), ("embed", "heads"))
        self.norm = build.scale(inner, "heads")
        self.out = build.linear((inner, build.embed), ("heads", "embed"), residual=True)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        spec, shape = self.spec, x.shape[:2]
        assert rows.layer is not None
        rates = jnp.asarray(spec.rates)[rows.layer]
        parts = jax.nn.silu(self.query_key_value(x)).reshape(*shape, spec.heads, -1)
        query, key, value = jnp.split(parts, 3, axis=-1)
        if cache is not None:

            def transition(
                state: Any, valid: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
            ) -> tuple[jax.Array, Any]:
                output, stored = recur(query, key, value, rates, state[0], valid=valid)
                return output, (stored,)

            output: Any
            output, layer_cache = cache.recur(layer_cache, transition, query, key, value)
        else:
            output = _over_rows(query, key, value, rates, rows.segment_ids)
        normed = self.norm_spec(output.reshape(*shape, -1), self.norm, _HEADS[:3])
        return self.out(normed * jax.nn.sigmoid(self.gate(x))), layer_cache


def _over_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, rates: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
    """Returns the outputs of `recur` over complete rows, whose blocks several devices may share."""
    if sharing_devices() == 1:
        output, _ = recur(query, key, value, rates, first=segment_starts(segment_ids))
        return output
    query, key, value = map(to_blocks, (query, key, value))
    transition, first = jnp.broadcast_to(jnp.exp(-rates * query.shape[1]), (query.shape[0], query.shape[2])), None
    if segment_ids is not None:
        segment_ids = to_blocks(segment_ids)
        first = jnp.asarray(segment_starts(segment_ids, tokens_before(segment_ids, 1)))
        transition = jnp.where(jnp.any(first, axis=1, keepdims=True), 0, transition)
    _, state = recur(query, key, value, rates, first=first)
    output, _ = recur(query, key, value, rates, states_before(state, transition), first=first)
    return from_blocks(output)


def recur(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq heads head_dim"],
    value: Float[Array, "batch seq heads head_dim"],
    rates: Float[Array, " heads"],
    state: Float[Array, "batch heads head_dim head_dim"] | None = None,
    *,
    first: Bool[Array, "batch seq"] | None = None,
    valid: Bool[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads head_dim head_dim"]]:
    """Computes the recurrence of lightning attention.

        S_t = exp(-r) S_(t-1) + k_t v_t^T
        o_t = S_t^T q_t

    It is `ops.state_space` with a group per head, decays of -r and b = 1. Its reference computes blocks of tokens as
    Lightning Attention-2 does: products of queries and keys within a block, and the state between blocks.

    Args:
      query, key, value: q, k and v.
      rates: r of each head.
      state: S_0; None is 0.
      first: mask of the first tokens of documents, before which the state is cleared.
      valid: mask of the tokens that change the state; None for all.

    Returns:
      o, and the state after the last token.
    """
    decay = jnp.broadcast_to(-rates, query.shape[:3])
    if first is not None:
        decay = jnp.where(first[..., None], -jnp.inf, decay)
    beta = None
    if valid is not None:
        decay = jnp.where(valid[..., None], decay, 0)
        beta = jnp.broadcast_to(valid[..., None], decay.shape).astype(decay.dtype)
    operands: Any = {"decay": decay, "beta": beta, "initial_state": state}
    found: Any = ops.state_space(query, key, value, **operands, axes=_AXES)
    return found
