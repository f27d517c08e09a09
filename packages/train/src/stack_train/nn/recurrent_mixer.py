"""Base class of layers with a recurrence over a decaying state, after a short causal convolution."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.caches import KVCache
from stack_train.nn.context import check_unsplit_sequence
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.short_convolution import convolve, mask_taps, next_tail, segment_starts

__all__ = ["RecurrentMixer"]


class RecurrentMixer(nnx.Module):
    """A layer whose state is the last inputs of its convolution, and the float32 state of its recurrence.

    A subclass sets `spec`, with `kernel` and `state`, and `convolution`, [features, 1, kernel], and has `_recur`.

    Attributes:
      label: the recurrence, for messages.
    """

    label: ClassVar[str]
    spec: Any
    convolution: nnx.Param[Any]

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
        raise NotImplementedError

    def _run(
        self,
        x: Hidden,
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
          ShardingError: the mesh splits the rows, and there is no cache.
        """
        if cache is not None:

            def transition(state: Any, valid: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, Any]:
                return self._step(state, None, valid, *inputs)

            output: jax.Array
            output, layer_cache = cache.recur(layer_cache, transition, mixed, factor, decay)
            return output, layer_cache
        check_unsplit_sequence(self.label)
        first = segment_starts(rows.segment_ids)
        # A decay of -inf clears the state at the start of a document.
        decay = decay if first is None else jnp.where(first[..., None], -jnp.inf, decay)
        stored = self.spec.state(1, str(x.dtype))
        empty = [jnp.zeros((x.shape[0], *shape), of) for shape, of in zip(stored.shapes, stored.dtypes, strict=True)]
        taps = mask_taps(rows.segment_ids, self.spec.kernel)
        output, _ = self._step(empty, taps, None, mixed, factor, decay)
        return output, layer_cache

    def _step(
        self,
        state: Any,
        taps: jax.Array | None,
        valid: jax.Array | None,
        mixed: jax.Array,
        factor: jax.Array,
        decay: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Runs convolution and recurrence from a state.

        Args:
          state: last inputs of the convolution, and state of the recurrence.
          taps: see `convolve`.
          valid: bool[batch, seq], True for a prefix of each row; the remaining tokens do not change the state. None
            treats all tokens as valid.
        """
        tail, stored = state
        inputs = jnp.concatenate([tail.astype(mixed.dtype), mixed], axis=1)
        tail = next_tail(inputs, mixed.shape[1], valid)
        if valid is not None:
            factor, decay = (jnp.where(valid[..., None], each, 0) for each in (factor, decay))
        convolved = convolve(inputs, self.convolution[...][:, 0, :].astype(mixed.dtype), taps)
        output, stored = self._recur(convolved, stored, factor, decay)
        return output, (tail, stored)
