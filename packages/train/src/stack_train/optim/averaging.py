"""A moving average of the weights, for evaluation and export."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

__all__ = ["AveragedState", "average_weights"]


class AveragedState(NamedTuple):
    """The state of `average_weights`.

    Attributes:
      inner: state of the wrapped transformation.
      average: average of the parameters, in their structure and in float32.
      updates_done: int32 scalar, number of updates.
    """

    inner: Any
    average: Any
    updates_done: jax.Array


def average_weights(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Adds an exponential moving average of the updated parameters to a transformation.

        average <- d average + (1 - d) params,  d = min(decay, (1 + n) / (10 + n)) after n updates

    d is smaller in early updates, which removes the random initial weights from the average.
    """
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> AveragedState:
        # float32, because in bfloat16 the small share of a new value, 1 - d, would round to nothing.
        return AveragedState(inner.init(params), optax.tree.cast(params, jnp.float32), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AveragedState]:
        updates, inner_state = extended.update(updates, state.inner, params, **extra)
        done: Any = optax.safe_increment(state.updates_done)
        weight = jnp.minimum(decay, (1 + done) / (10 + done))
        average = jax.tree.map(
            lambda old, param: weight * old + (1 - weight) * param.astype(jnp.float32),
            state.average,
            # The updated parameters, which the caller computes only after this function.
            optax.apply_updates(params, updates),
        )
        return updates, AveragedState(inner_state, average, done)

    return optax.GradientTransformationExtraArgs(init, update)
