"""Skipping of updates with outlier gradient norms."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import config

__all__ = ["SkippedState", "SpikeConfig", "skip_spikes"]


@config
class SpikeConfig:
    """Settings for skipping updates whose gradient norm is not finite, or above mean + deviations * std.

    Mean and standard deviation are computed from the most recent finite norms, including norms of skipped updates.
    A norm that stays high therefore stops being a spike. Source: OLMo 2, 2025 (arXiv:2501.00656), which applies the
    same rule to the loss.

    Attributes:
      window_steps: number of recent norms in mean and standard deviation. Until half of them have been observed, only
        updates with a non-finite norm are skipped.
      deviations: number of standard deviations above the mean from which a norm is a spike.
      max_consecutive: maximum number of consecutive skipped updates. The next update is applied regardless of its norm;
        a diverged run then fails with an error.
    """

    window_steps: Annotated[int, Field(ge=2)] = 128
    deviations: PositiveFloat = 6.0
    max_consecutive: PositiveInt = 10

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"most_in_a_row": "optimizer.skip_spikes.max_consecutive"}
    )


class SkippedState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
      inner: state of the wrapped transformation.
      norms: float32[window_steps], ring buffer of the most recent finite norms.
      norms_seen: total number of finite norms.
      skipped: True if the last update was skipped.
      skipped_in_a_row: number of consecutive skipped updates, up to the last update.
      skipped_in_all: total number of skipped updates.
    """

    inner: Any
    norms: jax.Array
    norms_seen: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    skipped_in_all: jax.Array


def skip_spikes(inner: optax.GradientTransformation, config: SpikeConfig) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation to skip spikes, which then update neither the parameters nor the state of `inner`."""
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkippedState:
        none = jnp.zeros((), jnp.int32)
        return SkippedState(
            inner.init(params), jnp.zeros(config.window_steps, jnp.float32), none, jnp.zeros((), bool), none, none
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SkippedState]:
        norm = optax.tree.norm(updates).astype(jnp.float32)
        finite = jnp.isfinite(norm)
        skip = (~finite | _is_spike(norm, state, config)) & (state.skipped_in_a_row < config.max_consecutive)
        # Always computed: both results are selected below, inside one program.
        applied, inner_state = extended.update(updates, state.inner, params, **extra)

        def choose(skipped: jax.Array, updated: jax.Array) -> jax.Array:
            # Selects instead of multiplying by 0, which would keep the NaN of a skipped update.
            return jnp.where(skip, skipped, updated)

        norms = state.norms.at[state.norms_seen % config.window_steps].set(norm)
        return jax.tree.map(lambda x: choose(jnp.zeros_like(x), x), applied), SkippedState(
            inner=jax.tree.map(choose, state.inner, inner_state),
            norms=jnp.where(finite, norms, state.norms),
            norms_seen=state.norms_seen + finite,
            skipped=skip,
            skipped_in_a_row=jnp.where(skip, state.skipped_in_a_row + 1, 0),
            skipped_in_all=state.skipped_in_all + skip,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_spike(norm: jax.Array, state: SkippedState, config: SpikeConfig) -> jax.Array:
    # Unfilled entries of the ring buffer are 0: they do not change the sum, but must be masked in the variance.
    known = jnp.arange(config.window_steps) < state.norms_seen
    count = jnp.sum(known).astype(jnp.float32)
    mean = jnp.sum(state.norms) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(known, (state.norms - mean) ** 2, 0)) / jnp.maximum(count - 1, 1)
    return (count >= config.window_steps / 2) & (norm > mean + config.deviations * jnp.sqrt(variance))
