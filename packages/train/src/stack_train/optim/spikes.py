"""Skipping updates whose gradients are far out of the ordinary."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import config

__all__ = ["SkippedState", "SpikeConfig", "skip_spikes"]


@config
class SpikeConfig:
    """Which updates are skipped: those with a gradient norm that is not finite, or above mean + deviations * std.

    Mean and standard deviation are those of the last finite norms, skipped ones included, so that a level that lasts
    becomes the ordinary one. Source: OLMo 2, 2025 (arXiv:2501.00656), which does the same to the loss.

    Attributes:
      window_steps: how many norms; nothing but what is not finite is skipped before half of them are known.
      most_in_a_row: skipped updates after which the next is applied whatever its norm, so that training that is
        broken ends with an error.
    """

    window_steps: Annotated[int, Field(ge=2)] = 128
    deviations: PositiveFloat = 6.0
    most_in_a_row: PositiveInt = 10


class SkippedState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
      norms: [window_steps], the last finite ones, in a ring.
      norms_seen: how many finite norms there were.
      skipped: whether the last update was.
    """

    inner: Any
    norms: jax.Array
    norms_seen: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    skipped_in_all: jax.Array


def skip_spikes(inner: optax.GradientTransformation, config: SpikeConfig) -> optax.GradientTransformation:
    """Leaves parameters and `inner`'s state as they are where `config` says so."""

    def init(params: Any) -> SkippedState:
        none = jnp.zeros((), jnp.int32)
        return SkippedState(
            inner.init(params), jnp.zeros(config.window_steps, jnp.float32), none, jnp.zeros((), bool), none, none
        )

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, SkippedState]:
        norm = optax.tree.norm(updates).astype(jnp.float32)
        finite = jnp.isfinite(norm)
        skip = (~finite | _is_spike(norm, state, config)) & (state.skipped_in_a_row < config.most_in_a_row)
        applied, inner_state = inner.update(updates, state.inner, params)

        def choose(skipped: jax.Array, done: jax.Array) -> jax.Array:
            return jnp.where(skip, skipped, done)

        norms = state.norms.at[state.norms_seen % config.window_steps].set(norm)
        return jax.tree.map(lambda x: choose(jnp.zeros_like(x), x), applied), SkippedState(
            inner=jax.tree.map(choose, state.inner, inner_state),
            norms=jnp.where(finite, norms, state.norms),
            norms_seen=state.norms_seen + finite,
            skipped=skip,
            skipped_in_a_row=jnp.where(skip, state.skipped_in_a_row + 1, 0),
            skipped_in_all=state.skipped_in_all + skip,
        )

    return optax.GradientTransformation(init, update)


def _is_spike(norm: jax.Array, state: SkippedState, config: SpikeConfig) -> jax.Array:
    known = jnp.arange(config.window_steps) < state.norms_seen
    count = jnp.sum(known).astype(jnp.float32)
    mean = jnp.sum(state.norms) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(known, (state.norms - mean) ** 2, 0)) / jnp.maximum(count - 1, 1)
    return (count >= config.window_steps / 2) & (norm > mean + config.deviations * jnp.sqrt(variance))
