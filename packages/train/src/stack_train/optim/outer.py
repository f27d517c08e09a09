"""Outer steps over several updates of an optimizer."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import config

__all__ = ["OuterConfig", "OuterState", "outer_step", "take_outer_steps"]


@config
class OuterConfig:
    """Settings of outer steps, each of which replaces the sum of several updates by a step with Nesterov momentum.

    With several replicas, gradients are not exchanged between replicas; an outer step averages the parameters that they
    have reached. With one replica, gradients are averaged over all devices at every update. Source: Douillard et al.,
    DiLoCo, 2023 (arXiv:2311.08105); for one replica Charles et al., Communication-Efficient Language Model Training
    Scales Reliably and Robustly, 2025 (arXiv:2503.09799).

    Attributes:
      every_steps: number of updates between outer steps.
      replicas: number of replicas that train apart between outer steps, each on its own part of the batch and of the
        devices. It must divide `mesh.data`.
      learning_rate: factor on the outer step.
      momentum: decay of the momentum.
    """

    every_steps: PositiveInt = 30
    replicas: PositiveInt = 1
    learning_rate: PositiveFloat = 0.7
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9


class OuterState(NamedTuple):
    """The state of `take_outer_steps`.

    Attributes:
      inner: state of the wrapped transformation.
      anchor: parameters after the last outer step, in float32.
      momentum: sum of the outer gradients with decay, in float32.
      updates_done: int32 scalar, number of updates.
    """

    inner: Any
    anchor: Any
    momentum: Any
    updates_done: jax.Array


def outer_step(anchor: Any, reached: Any, momentum: Any, config: OuterConfig) -> tuple[Any, Any]:
    """Returns the parameters after an outer step, and its momentum.

    Args:
      anchor: parameters after the previous outer step.
      reached: parameters that the updates since then have reached.
      momentum: momentum of the previous outer step.
    """
    gradient = optax.tree.sub(anchor, reached)
    momentum = optax.tree.add(optax.tree.scale(config.momentum, momentum), gradient)
    step = optax.tree.add(optax.tree.scale(config.momentum, momentum), gradient)
    return optax.tree.add_scale(anchor, -config.learning_rate, step), momentum


def take_outer_steps(inner: optax.GradientTransformation, config: OuterConfig) -> optax.GradientTransformationExtraArgs:
    """Adds an outer step after every h updates of a transformation.

        d = anchor - params,  m <- b m + d,  params = anchor <- anchor - r (b m + d)

    d is the outer gradient, b the momentum and r the outer learning rate. With r = 1 and b = 0 nothing changes.
    """
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> OuterState:
        anchor = optax.tree.cast(params, jnp.float32)
        return OuterState(inner.init(params), anchor, optax.tree.zeros_like(anchor), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, OuterState]:
        updates, inner_state = extended.update(updates, state.inner, params, **extra)
        done: Any = optax.safe_increment(state.updates_done)
        is_outer = done % config.every_steps == 0

        def choose(outer: Any, otherwise: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(is_outer, x, y).astype(y.dtype), outer, otherwise)

        reached = optax.tree.add(optax.tree.cast(params, jnp.float32), optax.tree.cast(updates, jnp.float32))
        anchor, momentum = outer_step(state.anchor, reached, state.momentum, config)
        moved = optax.tree.sub(anchor, optax.tree.cast(params, jnp.float32))
        return choose(moved, updates), OuterState(
            inner_state, choose(anchor, state.anchor), choose(momentum, state.momentum), done
        )

    return optax.GradientTransformationExtraArgs(init, update)
