"""Linear attention by the gated delta rule, after a short causal convolution.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024 (arXiv:2412.06464), in the variant of Qwen3-Next.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.caches import KVCache, Recurrent
from stack_train.nn.build import Build
from stack_train.nn.recurrent_mixer import RecurrentMixer
from stack_train.nn.residual import Hidden, Norm, Rows

__all__ = ["DeltaAttention", "GatedDelta"]

# As in Qwen3-Next, which adds it to the sum of squares and not to the norm.
_UNIT_EPSILON = 1e-6
_HEADS = ("batch", "seq", "act_heads", None)
_AXES = {"query": _HEADS, "value": _HEADS, "decay": _HEADS[:3], "initial_state": ("batch", "act_heads", None, None)}


@dataclass(frozen=True, kw_only=True)
class DeltaAttention:
    """Gated delta rule, y = (norm(o) * silu(z)) O.

        o = linear_attention(q, k, v)        q, k, v = silu(convolution(x Q, x K, x V))

    Queries and keys are normalized to unit length, and queries are then divided by sqrt(key_dim). A group of value
    heads shares one query and key head. z is a projected gate. A head's decay is -exp(a) softplus(x D + t), and its
    beta is sigmoid(x B).

    Attributes:
      key_heads: number of query and key heads.
      value_heads: number of value heads, a multiple of `key_heads`.
      key_dim: width of query and key heads.
      value_dim: width of value heads.
      kernel: size of the convolution in tokens, the current token included.
      separate: stores x [Q K V], z, x B and x D in four matrices (Qwen3.5), instead of x [Q K V z] and x [B D] in two
        whose columns are ordered by key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    separate: bool = False

    @property
    def mixed(self) -> int:
        """Number of features of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def build(self, build: Build) -> "GatedDelta":
        return GatedDelta(self, build)

    def state(self, repeats: int, dtype: str) -> Recurrent:
        tail, stored = (self.kernel - 1, self.mixed), (self.value_heads, self.key_dim, self.value_dim)
        # The state of the delta rule sums over all tokens of a sequence, so it is float32 in any cache.
        return Recurrent(repeats=repeats, shapes=(tail, stored), dtypes=(dtype, "float32"))


class GatedDelta(RecurrentMixer):
    """Module of a `DeltaAttention`."""

    def __init__(self, spec: DeltaAttention, build: Build) -> None:
        embed, values = build.embed, spec.value_heads * spec.value_dim
        # This norm's scales start at 1 in Qwen3-Next, although its other norms have an offset.
        self.spec, self.norm_spec = spec, Norm(epsilon=build.norm.epsilon)
        # The n-th matrix has the n-th key, so each layout creates its own ones only.
        if spec.separate:
            self.query_key_value = build.linear((embed, spec.mixed), ("embed", "heads"))
            self.gate = build.linear((embed, values), ("embed", "heads"))
            self.beta = build.linear((embed, spec.value_heads), ("embed", "heads"))
            self.decay = build.linear((embed, spec.value_heads), ("embed", "heads"))
        else:
            self.query_key_value_gate = build.linear((embed, spec.mixed + values), ("embed", "heads"))
            self.beta_decay = build.linear((embed, 2 * spec.value_heads), ("embed", "heads"))
        self.convolution = build.normal((spec.mixed, 1, spec.kernel), ("heads", None, None))
        self.log_rate = build.full(spec.value_heads, "heads", 0.0)
        self.step = build.full(spec.value_heads, "heads", 1.0)
        self.norm = build.full(spec.value_dim, "norm", 1.0)
        self.out = build.linear((values, embed), ("heads", "embed"), residual=True)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        mixed, gate, beta, decay = self._projected(x)
        output, layer_cache = self._run(rows, cache, layer_cache, mixed, beta, decay)
        output = self.norm_spec(output, self.norm, _HEADS) * jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype)
        return self.out(output.reshape(*x.shape[:2], -1)), layer_cache

    def _projected(self, x: Hidden) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns concatenated queries, keys and values, [batch, seq, mixed], and each head's gate, beta and decay."""
        spec, shape = self.spec, x.shape[:2]
        if spec.separate:
            mixed, gate, beta, decay = self.query_key_value(x), self.gate(x), self.beta(x), self.decay(x)
        else:
            mixed, gate, beta, decay = self._split_by_key_head(x)
        beta, decay = (part.astype(jnp.float32) for part in (beta, decay))
        rate = -jnp.exp(self.log_rate[...].astype(jnp.float32))
        decay = rate * jax.nn.softplus(decay + self.step[...].astype(jnp.float32))
        return mixed, gate.reshape(*shape, spec.value_heads, -1), jax.nn.sigmoid(beta), decay

    def _split_by_key_head(self, x: Hidden) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        spec, shape = self.spec, x.shape[:2]
        wide = spec.value_heads // spec.key_heads * spec.value_dim
        # Query, key, value and gates of one key head are adjacent.
        parts = self.query_key_value_gate(x).reshape(*shape, spec.key_heads, -1)
        query, key, value, gate = jnp.split(parts, [spec.key_dim, 2 * spec.key_dim, 2 * spec.key_dim + wide], axis=-1)
        mixed = jnp.concatenate([part.reshape(*shape, -1) for part in (query, key, value)], axis=-1)
        beta, decay = jnp.split(self.beta_decay(x).reshape(*shape, spec.key_heads, -1), 2, axis=-1)
        return mixed, gate, beta.reshape(*shape, -1), decay.reshape(*shape, -1)

    def _carry(
        self, convolved: jax.Array, empty: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        query, key, value = self._heads(convolved)
        # Columns of the state do not mix, so the columns of an identity without values become the transition.
        identity = jnp.broadcast_to(jnp.eye(self.spec.key_dim), (*empty.shape[:3], self.spec.key_dim))
        values = jnp.concatenate([value, jnp.zeros_like(key)], axis=-1)
        operands: Any = {"decay": decay, "beta": factor, "initial_state": jnp.concatenate([empty, identity], axis=-1)}
        _, state = ops.linear_attention(query, key, values, **operands, axes=_AXES)
        found, transition = jnp.split(state, [self.spec.value_dim], axis=-1)
        return found, transition

    def _recur(
        self, convolved: jax.Array, state: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        operands: Any = {"decay": decay, "beta": factor, "initial_state": state}
        output: jax.Array
        output, state = ops.linear_attention(*self._heads(convolved), **operands, axes=_AXES)
        return output, state

    def _heads(self, convolved: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries and keys, [batch, seq, value_heads, key_dim], and values."""
        spec, (batch, seq, _) = self.spec, convolved.shape
        keys = spec.key_heads * spec.key_dim
        query, key, value = jnp.split(jax.nn.silu(convolved), [keys, 2 * keys], axis=-1)
        query, key = (_unit(part.reshape(batch, seq, spec.key_heads, -1)) for part in (query, key))
        query = query / jnp.asarray(math.sqrt(spec.key_dim), query.dtype)
        query, key = (jnp.repeat(part, spec.value_heads // spec.key_heads, axis=2) for part in (query, key))
        return query, key, value.reshape(batch, seq, spec.value_heads, -1)


def _unit(x: jax.Array) -> jax.Array:
    # In float32, because a bfloat16 sum of squares loses small features.
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _UNIT_EPSILON)).astype(x.dtype)
