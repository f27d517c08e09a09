"""Optimizer state lies as the parameter of the same path, along the axes that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_train.optim import AdamWConfig
from stack_train.optim.placement import like_parameters

SPECS = {
    "norm": PartitionSpec("tensor"),
    "blocks": {"norm": PartitionSpec(), "kernel": PartitionSpec(None, "fsdp", "tensor")},
}
PARAMS = {"norm": jnp.zeros(4), "blocks": {"norm": jnp.zeros((2, 4)), "kernel": jnp.zeros((2, 6, 4))}}


@pytest.fixture
def specs():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))

    def place(state):
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda node: isinstance(node, PartitionSpec)
        )
        placed = like_parameters(state, PARAMS, shardings, NamedSharding(mesh, PartitionSpec()))
        return jax.tree.map(lambda sharding: sharding.spec, placed)

    return place


def test_moments_lie_as_their_parameters_and_counts_are_replicated(specs):
    state = specs(optax.adam(1.0).init(PARAMS))[0]
    assert (
        state.mu
        == state.nu
        == {**SPECS, "blocks": {"norm": PartitionSpec(None, None), "kernel": SPECS["blocks"]["kernel"]}}
    )
    assert state.count == PartitionSpec()


def test_factored_moments_lie_along_the_axes_that_they_have(specs):
    state = specs(optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(PARAMS))
    kernel = {"v_row": state.v_row["blocks"]["kernel"], "v_col": state.v_col["blocks"]["kernel"]}
    assert set(kernel.values()) == {PartitionSpec(None, "fsdp"), PartitionSpec(None, "tensor")}
    assert state.v["blocks"]["kernel"] == PartitionSpec()  # one zero, where the moment is factored
    assert state.v["norm"] == SPECS["norm"]


SQUARES = {
    "square": (jnp.zeros((6, 6)), PartitionSpec("fsdp", "tensor")),
    "stacked": (jnp.zeros((2, 6, 6)), PartitionSpec(None, "fsdp", "tensor")),
}


@pytest.mark.parametrize("name", SQUARES)
def test_factored_moments_of_a_square_matrix_lie_along_an_axis_each(name):
    params, spec = {name: SQUARES[name][0]}, SQUARES[name][1]
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    # Two transformations of a chain have two moments each.
    state = optax.chain(factored, factored).init(params)
    whole = NamedSharding(mesh, PartitionSpec())
    placed = like_parameters(state, params, {name: NamedSharding(mesh, spec)}, whole)
    for each in placed:
        assert each.v_row[name].spec == PartitionSpec(*spec[:-1])
        assert each.v_col[name].spec == PartitionSpec(*spec[:-2], spec[-1])


def test_scales_of_rows_lie_along_the_other_axes_and_an_offloaded_state_on_the_host():
    params, spec = {"square": jnp.zeros((6, 6))}, PartitionSpec("fsdp", "tensor")
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    state = AdamWConfig(moments="8bit", offload=True).build(1, {"square": ("embed", "mlp")})
    shapes = jax.eval_shape(state.init, params)
    placed = like_parameters(
        shapes, params, {"square": NamedSharding(mesh, spec)}, NamedSharding(mesh, PartitionSpec())
    )
    found = {(leaf.memory_kind == "pinned_host", leaf.spec) for leaf in jax.tree.leaves(placed)}
    assert found == {(False, PartitionSpec()), (True, spec), (True, PartitionSpec("fsdp", None))}
