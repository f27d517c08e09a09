"""Mamba-2: a selective state space after a short causal convolution.

Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv:2405.21060), in the variant of Bamba and Granite 4.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core import ops
from stack_core.abi.caches import KVCache, Recurrent
from stack_train.nn.build import Build
from stack_train.nn.context import check_unsplit_sequence
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.short_convolution import convolve, mask_taps, next_tail, segment_starts

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


class StateSpaceMixer(nnx.Module):
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
        if cache is None:
            check_unsplit_sequence("Mamba-2")
            first = segment_starts(rows.segment_ids)
            # A decay of -inf clears the state at the start of a document.
            decay = decay if first is None else jnp.where(first[..., None], -jnp.inf, decay)
            taps = mask_taps(rows.segment_ids, spec.kernel)
            output, _ = self._recur(self._empty(x), taps, None, mixed, step, decay)
        else:

            def transition(state: Any, valid: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, Any]:
                return self._recur(state, None, valid, *inputs)

            output, layer_cache = cache.recur(layer_cache, transition, mixed, step, decay)
        gated = output.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        by_group = gated.reshape(*x.shape[:2], spec.groups, -1)
        normed: Any = ops.norm(by_group, epsilon=self.epsilon, axes={"x": _GROUPS})
        normed = normed.reshape(gate.shape).astype(x.dtype) * self.norm[...].astype(x.dtype)
        return self.out(normed), layer_cache

    def _recur(
        self,
        state: tuple[jax.Array, jax.Array],
        taps: jax.Array | None,
        valid: jax.Array | None,
        mixed: jax.Array,
        step: jax.Array,
        decay: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Runs convolution and state space from a state.

        Args:
          state: last inputs of the convolution, and state of the state space.
          taps: see `convolve`.
          valid: bool[batch, seq], True for a prefix of each row; the remaining tokens do not change the state. None
            treats all tokens as valid.
          mixed: projected features of the convolution, [batch, seq, mixed].
          step, decay: step sizes and decays, [batch, seq, heads].

        Returns:
          The outputs with their skips, [batch, seq, inner], and the new state.
        """
        spec, (tail, stored) = self.spec, state
        inputs = jnp.concatenate([tail.astype(mixed.dtype), mixed], axis=1)
        tail = next_tail(inputs, mixed.shape[1], valid)
        if valid is not None:
            # With a step of 0 and a decay of 0 (a logarithm), a token leaves the state unchanged.
            step, decay = (jnp.where(valid[..., None], each, 0) for each in (step, decay))
        flat = convolve(inputs, self.convolution[...][:, 0, :].astype(mixed.dtype), taps)
        if self.convolution_bias is not None:
            flat = flat + self.convolution_bias[...].astype(mixed.dtype)
        keys = spec.groups * spec.state_dim
        value, key, query = jnp.split(jax.nn.silu(flat), [spec.inner, spec.inner + keys], axis=-1)
        key, query = (part.reshape(*part.shape[:2], spec.groups, -1) for part in (key, query))
        value = value.reshape(*value.shape[:2], spec.heads, -1)
        operands: Any = {"decay": decay, "beta": step, "initial_state": stored}
        output, stored = ops.state_space(query, key, value, **operands, axes=_AXES)
        output = output + self.skip[...].astype(value.dtype)[:, None] * value
        return output.reshape(*mixed.shape[:2], -1), (tail, stored)

    def _empty(self, x: Hidden) -> tuple[jax.Array, jax.Array]:
        spec, rows = self.spec, x.shape[0]
        stored = jnp.zeros((rows, spec.heads, spec.state_dim, spec.head_dim), jnp.float32)
        return jnp.zeros((rows, spec.kernel - 1, spec.mixed), x.dtype), stored
