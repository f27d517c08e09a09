"""Recurrences over sequences that several devices share.

`context.to_zigzag` gives each device two blocks of a sequence. If a recurrence's new state is linear in its state, as
in Mamba-2, the gated delta rule and lightning attention, the devices exchange states once. Each block first runs from
an empty state. All devices receive its last state and its transition, which acts on the state before the block. They
compute the states before their blocks, from which the blocks run again.

The first run is the cost of another recurrence, and each device holds the states of all blocks of its sequences.

Source: Sun et al., Linear Attention Sequence Parallelism, 2024 (arXiv:2404.02882), with gathered states as in its
successor LASP-2 (arXiv:2502.07563), here with transitions that are matrices, too.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from stack_core.abi.errors import ShardingError
from stack_core.abi.mesh import LogicalAxes
from stack_train.nn.context import shared_axis, sharing_devices
from stack_train.nn.parts import map_parts

__all__ = ["from_blocks", "states_before", "to_blocks", "tokens_before"]

_STATE: LogicalAxes = ("batch", "act_heads", None, None)


def to_blocks(x: Shaped[Array, "rows tokens *values"]) -> Shaped[Array, "blocks half *values"]:
    """Makes each of the two blocks in a row of `to_zigzag` a separate row."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def from_blocks(x: Shaped[Array, "blocks half *values"]) -> Shaped[Array, "rows tokens *values"]:
    """Inverse of `to_blocks`."""
    return x.reshape(x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])


def tokens_before(x: Shaped[Array, "blocks half *values"], count: int) -> Shaped[Array, "blocks count *values"]:
    """Returns the last `count` tokens before each block of `to_blocks`; zeros before the first block of a sequence.

    Raises:
      ShardingError: a block has fewer tokens.
    """
    devices, half = sharing_devices(), x.shape[1]
    if half < count:
        raise ShardingError(
            f"{devices} devices share a sequence in blocks of {half} tokens, and a convolution reads {count} "
            "tokens before each block. Choose a smaller mesh.context or longer sequences.",
            logical_axes=["seq"],
        )
    axis = shared_axis()

    def of_device(ends: jax.Array) -> jax.Array:
        ends = _pairs(ends)
        # Device i has the blocks i and 2 n - 1 - i. Before them are the first block of device i - 1 and the second
        # block of device i + 1; before the second block of the last device is its own first one.
        low = lax.ppermute(ends[:, 0], axis, [(device, device + 1) for device in range(devices - 1)])
        high = lax.ppermute(ends[:, 1], axis, [(device + 1, device) for device in range(devices - 1)])
        high = jnp.where(lax.axis_index(axis) == devices - 1, ends[:, 0], high)
        return jnp.stack([low, high], axis=1).reshape(2 * len(ends), *ends.shape[2:])

    axes = ("batch", *[None] * (x.ndim - 1))
    given = [(x[:, half - count :], axes)]
    found: jax.Array = map_parts(of_device, given, axes, name="tokens before the blocks of a sequence")
    return found


def states_before(
    state: Float[Array, "blocks heads key_dim value_dim"],
    transition: Float[Array, "blocks heads *matrix"],
) -> Float[Array, "blocks heads key_dim value_dim"]:
    """Returns the state before each block; zeros before the first block of a sequence.

    Args:
      state: state after each block that began with an empty state.
      transition: operator of the block on an earlier state, a factor [blocks, heads] or a matrix [blocks, heads,
        key_dim, key_dim].
    """
    axis, devices = shared_axis(), sharing_devices()

    def in_order(x: jax.Array) -> jax.Array:
        """[2 rows, ...] -> [2 devices, rows, ...], in the order of the sequence."""
        gathered = lax.all_gather(_pairs(x), axis)
        return jnp.concatenate([gathered[:, :, 0], gathered[::-1, :, 1]])

    def of_device(state: jax.Array, transition: jax.Array) -> jax.Array:
        states = in_order(state)

        def read(before: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            added, passed = block
            return added + _apply(passed, before), before

        _, before = lax.scan(read, jnp.zeros_like(states[0]), (states, in_order(transition)))
        index = lax.axis_index(axis)
        own = jnp.stack([before[index], before[2 * devices - 1 - index]], axis=1)
        return own.reshape(state.shape)

    given = [(state, _STATE), (transition, _STATE[: transition.ndim])]
    found: jax.Array = map_parts(of_device, given, _STATE, name="states before the blocks of a sequence")
    return found


def _apply(transition: jax.Array, state: jax.Array) -> jax.Array:
    if transition.ndim == state.ndim:
        # By default, a TPU rounds float32 operands to bfloat16.
        return jnp.einsum("...kl,...lv->...kv", transition, state, precision=lax.Precision.HIGHEST)
    return transition[..., None, None] * state


def _pairs(x: jax.Array) -> jax.Array:
    """[2 rows, ...] -> [rows, 2, ...]."""
    return x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
