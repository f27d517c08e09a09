"""The contract suite of `short_conv`: test calls, and the definition in float64."""

import jax.numpy as jnp

from stack_core.testing import OpCase, OpSuite


def _case(name, x, width):
    return OpCase("short_conv", name, lambda rng: {"x": rng.normal(size=x), "weight": rng.normal(size=(width, x[-1]))})


def _oracle(x, weight):
    seq, width = x.shape[-2], len(weight)
    filters = jnp.stack([jnp.eye(seq, k=-k) for k in range(width)])  # [width, to, from]
    return jnp.einsum("ktf,...fc,kc->...tc", filters, x, weight)


SUITE = OpSuite(
    (
        _case("plain", (2, 9, 5), 4),
        _case("wider_than_the_sequence", (3, 2, 4), 5),
        _case("no_batch", (7, 3), 2),
        _case("one_tap", (2, 3, 4, 6), 1),
        _case("empty", (0, 4, 3), 2),
    ),
    _oracle,
)
