"""The state of an optimizer in the host's memory."""

from typing import Any, NamedTuple

import jax
import optax

__all__ = ["OffloadedState", "keep_on_host", "on_device"]


class OffloadedState(NamedTuple):
    """The state of `keep_on_host`.

    Attributes:
      on_host: state of the wrapped transformation. Its arrays are in the host's memory, its scalars on the device.
    """

    on_host: Any


def keep_on_host(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Copies the state of a transformation from the host's memory to the device for each update, and back after it.

    `like_parameters` places the state. XLA overlaps the copies with the step where its schedule allows.
    """
    extended = optax.with_extra_args_support(inner)

    def init(params: Any) -> OffloadedState:
        return OffloadedState(_move(extended.init(params), jax.memory.Space.Host))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, OffloadedState]:
        updates, inner_state = extended.update(updates, on_device(state.on_host), params, **extra)
        return updates, OffloadedState(_move(inner_state, jax.memory.Space.Host))

    return optax.GradientTransformationExtraArgs(init, update)


def on_device(tree: Any) -> Any:
    """Returns arrays in the device's memory, with the sharding they have."""
    return _move(tree, jax.memory.Space.Device)


def _move(tree: Any, space: jax.memory.Space) -> Any:
    # Compilers expect scalars, such as counts, on the device.
    return jax.tree.map(lambda leaf: jax.device_put(leaf, space) if leaf.ndim else leaf, tree)
