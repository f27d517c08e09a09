"""Mean squared inputs of products, against sums in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ShapeError
from stack_quant.errors import QuantError
from stack_quant.importance import measure_importance


@jax.tree_util.register_pytree_node_class
class Model:
    """A callable pytree: layers in a loop, experts, and logits by the transposed embedding."""

    def __init__(self, layers, experts, embedding):
        self.layers, self.experts, self.embedding = layers, experts, embedding

    def tree_flatten(self):
        return (self.layers, self.experts, self.embedding), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def __call__(self, tokens):
        x = self.embedding[tokens]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.layers)
        sizes = jnp.asarray([2, len(tokens) - 2], jnp.int32)
        return ops.ragged_dot(x, self.experts, sizes) @ self.embedding.T


def model():
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in ((2, 6, 6), (2, 6, 6), (9, 6))]
    return Model(*map(jnp.asarray, arrays))


STREAM = [np.asarray(tokens, np.int32) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])]


def test_inputs_are_those_of_each_layer_expert_and_head():
    each = model()
    found = measure_importance(each, STREAM).mean_squares
    x = np.asarray(each.embedding)[np.concatenate(STREAM)]
    expected = {"0": [], "1": []}
    for layer in np.asarray(each.layers):
        expected["0"].append(np.mean(x**2, 0)[:, None])
        x = np.tanh(x @ layer)
    rows = np.arange(8) % 4 < 2
    # Every expert multiplies its own rows, and the others count as zeros.
    expected["1"] = [np.sum(x[own] ** 2, 0)[:, None] for own in (rows, ~rows)]
    outputs = np.where(rows[:, None], x @ np.asarray(each.experts[0]), x @ np.asarray(each.experts[1]))
    assert sorted(found) == ["0", "1", "2"] and [found[name].shape for name in sorted(found)] == [
        (2, 6, 1),
        (2, 6, 1),
        (1, 6),
    ]
    np.testing.assert_allclose(found["0"], expected["0"], rtol=1e-5)
    normalized = [array / array.sum(-2, keepdims=True) for array in (found["1"], np.asarray(expected["1"]))]
    np.testing.assert_allclose(*normalized, rtol=1e-5)
    np.testing.assert_allclose(found["2"], np.mean(outputs**2, 0, keepdims=True), rtol=1e-5)


def test_a_parameter_that_is_multiplied_in_parts_is_left_with_its_reason():
    found = measure_importance(jax.tree_util.Partial(lambda w, x: x @ w[:3], jnp.ones((6, 2))), [jnp.ones((4, 3))])
    assert not found.mean_squares and "only a part" in found.left["0/0"]


def test_batches_without_numbers_without_end_or_of_other_shapes_are_refused():
    each = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 2)))
    with pytest.raises(QuantError, match="stream is empty"):
        measure_importance(each, [])
    with pytest.raises(ShapeError, match="different shapes"):
        measure_importance(each, [jnp.ones((4, 3)), jnp.ones((5, 3))])
    with pytest.raises(QuantError, match="NaN or infinities"):
        measure_importance(each, [jnp.full((4, 3), jnp.nan)])
