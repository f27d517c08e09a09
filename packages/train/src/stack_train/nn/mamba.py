"""Mamba-2: a selective state space after a short causal convolution.

Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv:2405.21060), in the variant of Bamba and Granite 4.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.abi.caches import KVCache, Recurrent
from stack_train.nn.build import Build
from stack_train.nn.recurrent_mixer import RecurrentMixer
from stack_train.nn.residual import Hidden, Rows

__all__ = ["Mamba2", "StateSpaceMixer"]

_GROUPS, _HEADS = ("batch", "seq", "act_kv_heads", None), ("batch", "seq", "act_heads", None)
_AXES = {"query": _GROUPS, "key": _GROUPS, "value": _HEADS, "decay": _HEADS[:3], "beta": _HEADS[:3]}
_AXES |= {"initial_state": ("batch", "act_heads", None, None)}


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Selective state space, y = norm((state_space(c, b, u) + s u) * silu(z)) O.

    u, b and c are silu(convolution(x W)), and z is a projected gate. The step size of a head is
    dt = softplus(x D + t), which is the factor of its values, and its decay is -exp(a) dt. The norm is an RMS norm of
    the features of each group.

    Attributes:
      heads: number of heads.
      head_dim: width of a head.
      groups: number of pairs of b and c, each shared by heads / groups heads.
      state_dim: width of b and c.
      kernel: size of the convolution in tokens, the current token included.
      bias: adds biases to the two projections.
      kernel_bias: adds a bias to the convolution.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    bias: bool = False
    kernel_bias: bool = True

    @property
    def inner(self) -> int:
        """Number of features of all heads."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Number of features of the convolution: u, b and c."""
        return self.inner + 2 * self.groups * self.state_dim

    def build(self, build: Build) -> "StateSpaceMixer":
        return StateSpaceMixer(self, build)

    def state(self, repeats: int, dtype: str) -> Recurrent:
        tail, stored = (self.kernel - 1, self.mixed), (self.heads, self.state_dim, self.head_dim)
        # The state sums over all tokens of a sequence, so it is float32 in any cache.
        return Recurrent(repeats=repeats, shapes=(tail, stored), dtypes=(dtype, "float32"))


class StateSpaceMixer(RecurrentMixer):
    """Module of a `Mamba2`.

    Initial values are Mamba-2's: decay rates of 1 to `heads`, skips of 1, and steps of softplus(1).
    """

    def __init__(self, spec: Mamba2, build: Build) -> None:
        self.spec, self.epsilon = spec, build.norm.epsilon
        width = spec.inner + spec.mixed + spec.heads
        self.project = build.linear((build.embed, width), ("embed", "heads"), bias=spec.bias)
        self.convolution = build.normal((spec.mixed, 1, spec.kernel), ("heads", None, None))
        self.convolution_bias = build.full(spec.mixed, "heads", 0.0) if spec.kernel_bias else None
        self.log_rate = build.full(spec.heads, "heads", jnp.log(jnp.arange(1.0, spec.heads + 1)))
        self.step = build.full(spec.heads, "heads", 1.0)
        self.skip = build.full(spec.heads, "heads", 1.0)
        self.norm = build.full(spec.inner, "heads", 1.0)
        self.out = build.linear((spec.inner, build.embed), ("heads", "embed"), bias=spec.bias, residual=True)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        spec = self.spec
        gate, mixed, step = jnp.split(self.project(x), [spec.inner, spec.inner + spec.mixed], axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step[...].astype(jnp.float32))
        decay = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * step
        output, layer_cache = self._run(rows, cache, layer_cache, mixed, step, decay)
        gated = output.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        by_group = gated.reshape(*x.shape[:2], spec.groups, -1)
        normed: Any = ops.norm(by_group, epsilon=self.epsilon, axes={"x": _GROUPS})
        normed = normed.reshape(gate.shape).astype(x.dtype) * self.norm[...].astype(x.dtype)
        return self.out(normed), layer_cache

    def _carry(
        self, convolved: jax.Array, empty: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        _, state = self._recur(convolved, empty, factor, decay)
        return state, jnp.exp(jnp.sum(decay, axis=1))

    def _recur(
        self, convolved: jax.Array, state: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs of the state space with their skips, [batch, seq, inner], and the new state."""
        spec, (batch, seq, _) = self.spec, convolved.shape
        if self.convolution_bias is not None:
            convolved = convolved + self.convolution_bias[...].astype(convolved.dtype)
        keys = spec.groups * spec.state_dim
        value, key, query = jnp.split(jax.nn.silu(convolved), [spec.inner, spec.inner + keys], axis=-1)
        key, query = (part.reshape(batch, seq, spec.groups, -1) for part in (key, query))
        value = value.reshape(batch, seq, spec.heads, -1)
        operands: Any = {"decay": decay, "beta": factor, "initial_state": state}
        output, state = ops.state_space(query, key, value, **operands, axes=_AXES)
        output = output + self.skip[...].astype(value.dtype)[:, None] * value
        return output.reshape(batch, seq, -1), state
