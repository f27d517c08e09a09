"""The denoising objective inside an objective of post-training, `objective.denoising`."""

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import jax

from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry

__all__ = ["DENOISING", "Denoising", "check_denoising", "check_reference", "condition_of"]

_NAMES = ("epsilon", "flow_matching", "v")


@runtime_checkable
class Denoising(Protocol):
    """A training objective of denoisers, such as `flow_matching` of stack-train."""

    @property
    def prediction(self) -> str:
        """Target of the prediction: "epsilon", "v" or "flow"."""
        ...

    def noisy(self, model: Any, images: jax.Array, noise: jax.Array, *, key: jax.Array) -> tuple[jax.Array, ...]:
        """Samples timesteps; returns noisy images, timesteps, targets, and the weight of each image."""
        ...

    def drop_condition(
        self, model: Any, condition: Mapping[str, jax.Array], rows: int, *, key: jax.Array
    ) -> Mapping[str, jax.Array]:
        """Replaces the condition of a random fraction of the rows by the unconditional one."""
        ...


def _entries() -> tuple[Mapping[str, Entry], Mapping[str, str]]:
    return {each.name: each for each in registries.objectives.entries() if each.name in _NAMES}, {}


# A part of the registry, because an objective that may contain any other could contain itself. By name, because only
# imported classes show whether they train denoisers, and these are being imported.
DENOISING: Final[Registry[Any]] = Registry("denoising objectives", _entries)
"""The entries of the registry `objectives` that train denoisers."""


def check_denoising(objective: Any) -> None:
    """Raises a ConfigError if an objective trains no denoiser."""
    if not isinstance(objective, Denoising):
        raise ConfigError(
            f"objective.denoising.name is {getattr(objective, 'name', objective)!r}, which trains no denoiser. Choose "
            "the objective of the run's start: flow_matching, epsilon or v."
        )


def check_reference(reference: str) -> None:
    """Raises a ConfigError if a reference is neither the initial model nor the model of a run."""
    if reference != "init" and not reference.startswith("run:"):
        raise ConfigError(
            f"objective.reference is {reference!r}. Choose init, the model at the start of the run, or run:DIRECTORY."
        )


def condition_of(batch: Mapping[str, jax.Array], inputs: Collection[str]) -> dict[str, jax.Array]:
    """Returns the condition in a batch: all arrays that are not inputs of the objective."""
    return {name: array for name, array in batch.items() if name not in inputs}
