"""Losses of `forward_backward`, by name: sums over tokens, without any mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from stack_core.abi.errors import DataError, nearest

__all__ = ["LOSSES", "NamedLoss", "loss_settings"]

_Inputs: TypeAlias = Mapping[str, Float[Array, "..."]]
_Settings: TypeAlias = Mapping[str, Float[Array, ""]]


@dataclass(frozen=True)
class NamedLoss:
    """A loss of each target token, to be summed.

    Attributes:
      token_losses: function of the targets' log-probabilities, the inputs and the settings; all arrays have one shape.
      inputs: arrays of a datum that it reads besides `target_tokens`.
      settings: its settings with their defaults (`loss_fn_config`).
    """

    token_losses: Callable[[Float[Array, "..."], _Inputs, _Settings], Float[Array, "..."]]
    inputs: tuple[str, ...]
    settings: Mapping[str, float] = field(default_factory=dict)


def _cross_entropy(logprobs: jax.Array, inputs: _Inputs, settings: _Settings) -> jax.Array:
    """Computes -w log p."""
    return -inputs["weights"] * logprobs


def _importance_sampling(logprobs: jax.Array, inputs: _Inputs, settings: _Settings) -> jax.Array:
    """Computes -r A, with r = p / q and log q in `logprobs`."""
    return -jnp.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logprobs: jax.Array, inputs: _Inputs, settings: _Settings) -> jax.Array:
    """Computes -min(r A, clip(r) A). Schulman et al., 2017 (arXiv:1707.06347)."""
    ratio, advantages = jnp.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    return -jnp.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: jax.Array, inputs: _Inputs, settings: _Settings) -> jax.Array:
    """Computes -sg(clip(r)) A log p. MiniMax, 2025 (arXiv:2506.13585)."""
    ratio = jnp.exp(logprobs - inputs["logprobs"])
    return -jax.lax.stop_gradient(_clipped(ratio, settings)) * inputs["advantages"] * logprobs


def _dro(logprobs: jax.Array, inputs: _Inputs, settings: _Settings) -> jax.Array:
    """Computes -(A log p - beta / 2 (log r)^2). Richemond et al., 2024 (arXiv:2405.19107)."""
    square = jnp.square(logprobs - inputs["logprobs"])
    return -(inputs["advantages"] * logprobs - 0.5 * settings["beta"] * square)


def _clipped(ratio: jax.Array, settings: _Settings) -> jax.Array:
    return jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


_SAMPLED: Final = ("logprobs", "advantages")
_clip = lambda low, high: {"clip_low_threshold": low, "clip_high_threshold": high}

LOSSES: Final[Mapping[str, NamedLoss]] = MappingProxyType(
    {
        "cross_entropy": NamedLoss(_cross_entropy, ("weights",)),
        "importance_sampling": NamedLoss(_importance_sampling, _SAMPLED),
        "ppo": NamedLoss(_ppo, _SAMPLED, _clip(0.8, 1.2)),
        "cispo": NamedLoss(_cispo, _SAMPLED, _clip(0.0, 4.0)),
        "dro": NamedLoss(_dro, _SAMPLED, {"beta": 0.05}),
    }
)
"""The losses by name."""


def loss_settings(name: str, settings: Mapping[str, float | str] | None) -> dict[str, float]:
    """Returns all settings of a loss, with defaults.

    Raises:
      DataError: the loss or a setting is unknown, or a value is not a number.
    """
    if name not in LOSSES:
        raise DataError(
            f"There is no loss {name!r}.{nearest(name, LOSSES)} Known: {', '.join(LOSSES)}. For any other loss, use "
            "forward_backward_custom, which computes it on the client."
        )
    known, given = LOSSES[name].settings, dict(settings or {})
    for key, value in given.items():
        if key not in known:
            has = f"It has: {', '.join(known)}." if known else "It has no settings. Leave loss_fn_config out."
            raise DataError(f"The loss {name!r} has no setting {key!r}. {has}")
        if not isinstance(value, int | float):
            raise DataError(f"The setting {key!r} of the loss {name!r} is {value!r}; give a number.")
    return {key: float(given.get(key, default)) for key, default in known.items()}
