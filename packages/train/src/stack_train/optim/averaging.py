"""A moving average of the weights, for evaluation and export."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

__all__ = ["AveragedState", "average_weights"]


class AveragedState(NamedTuple):
    """The state of `average_weights`; `average` has the structure of the parameters, in float32."""

    inner: Any
    average: Any
    updates_done: jax.Array


def average_weights(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of the parameters that a transformation's updates lead to.

        average <- d average + (1 - d) params,  d = min(decay, (1 + n) / (10 + n)) after n updates

    The smaller d of early updates forgets the random weights that training starts from.
    """

    def init(params: Any) -> AveragedState:
        return AveragedState(inner.init(params), optax.tree.cast(params, jnp.float32), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, AveragedState]:
        updates, inner_state = inner.update(updates, state.inner, params)
        done: Any = optax.safe_increment(state.updates_done)
        weight = jnp.minimum(decay, (1 + done) / (10 + done))
        average = jax.tree.map(
            lambda old, param: weight * old + (1 - weight) * param.astype(jnp.float32),
            state.average,
            optax.apply_updates(params, updates),
        )
        return updates, AveragedState(inner_state, average, done)

    return optax.GradientTransformation(init, update)
