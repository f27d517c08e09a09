"""Base class of layers with a recurrence over a decaying state, after a short causal convolution."""

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.caches import KVCache
from stack_train.nn.context import sharing_devices
from stack_train.nn.residual import Rows
from stack_train.nn.shared_recurrence import from_blocks, states_before, to_blocks, tokens_before
from stack_train.nn.short_convolution import convolve, mask_taps, next_tail, segment_starts

__all__ = ["RecurrentMixer"]


class RecurrentMixer(nnx.Module):
    """A layer whose state is the last inputs of its convolution, and the float32 state of its recurrence.

    A subclass sets `spec`, with `kernel` and `state`, and `convolution`, [features, 1, kernel], and has `_recur` and
    `_carry`.
    """

    spec: Any
    convolution: nnx.Param[Any]

    @abstractmethod
    def _recur(
        self, convolved: jax.Array, state: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the recurrence from a state; returns the outputs and the new state.

        Args:
          convolved: outputs of the convolution, [batch, seq, features].
          state: state of the recurrence.
          factor: factor of the values, [batch, seq, heads]; 0 leaves the state unchanged if `decay` is 0.
          decay: natural logarithm of the decay factor, [batch, seq, heads].
        """

    @abstractmethod
    def _carry(
        self, convolved: jax.Array, empty: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the state after a row that begins with the state `empty`, and its transition; see `states_before`."""

    def _run(
        self,
        rows: Rows,
        cache: KVCache | None,
        layer_cache: Any,
        mixed: jax.Array,
        factor: jax.Array,
        decay: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Runs convolution and recurrence from the states of a cache, or over complete rows without a cache.

        Args:
          mixed: inputs of the convolution, [batch, seq, features].
          factor, decay: see `_recur`.

        Raises:
          ShardingError: the mesh splits rows into blocks that are shorter than the convolution.
        """
        if cache is not None:
            output: jax.Array
            output, layer_cache = cache.recur(layer_cache, self._step, mixed, factor, decay)
            return output, layer_cache
        return self._run_rows(rows.segment_ids, mixed, factor, decay), layer_cache

    def _run_rows(
        self, segment_ids: jax.Array | None, mixed: jax.Array, factor: jax.Array, decay: jax.Array
    ) -> jax.Array:
        """Runs convolution and recurrence over complete rows, whose blocks several devices may share."""
        is_shared, size = sharing_devices() > 1, self.spec.kernel - 1
        before: jax.Array | None = None
        if is_shared:
            mixed, factor, decay = map(to_blocks, (mixed, factor, decay))
            if segment_ids is not None:
                segment_ids = to_blocks(segment_ids)
                before = tokens_before(segment_ids, max(size, 1))
        stored = self.spec.state(1, str(mixed.dtype))
        shapes = ((len(mixed), *shape) for shape in stored.shapes)
        tail, state = (jnp.zeros(shape, of) for shape, of in zip(shapes, stored.dtypes, strict=True))
        tail = tokens_before(mixed, size) if is_shared else tail
        first = segment_starts(segment_ids, before)
        # A decay of -inf clears the state at the start of a document.
        decay = decay if first is None else jnp.where(first[..., None], -jnp.inf, decay)
        taps = mask_taps(segment_ids, size + 1, before)
        convolved = self._convolve(jnp.concatenate([tail, mixed], axis=1), taps)
        if is_shared:
            state = states_before(*self._carry(convolved, state, factor, decay))
        output, _ = self._recur(convolved, state, factor, decay)
        return from_blocks(output) if is_shared else output

    def _step(
        self,
        state: Any,
        valid: jax.Array,
        mixed: jax.Array,
        factor: jax.Array,
        decay: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Runs convolution and recurrence from a state.

        Args:
          state: last inputs of the convolution, and state of the recurrence.
          valid: bool[batch, seq], True for a prefix of each row; the remaining tokens do not change the state.
        """
        tail, stored = state
        inputs = jnp.concatenate([tail.astype(mixed.dtype), mixed], axis=1)
        tail = next_tail(inputs, mixed.shape[1], valid)
        factor, decay = (jnp.where(valid[..., None], each, 0) for each in (factor, decay))
        output, stored = self._recur(self._convolve(inputs, None), stored, factor, decay)
        return output, (tail, stored)

    def _convolve(self, inputs: jax.Array, taps: jax.Array | None) -> jax.Array:
        return convolve(inputs, self.convolution[...][:, 0, :].astype(inputs.dtype), taps)
