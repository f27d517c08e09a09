"""Ops in programs that `jax.export` writes for symbolic sizes, run with sizes that no tile divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.ops import OpImplementation


def block(x, scale, up, gate, positions):
    x = ops.gated_linear_unit(ops.linear(ops.norm(x, scale), up), up, gate)
    return ops.rope(x.reshape(*positions.shape, 2, 8), positions)


def attention(query, key, value, lengths):
    return ops.attention(query, key, value, causal=True, window=(40, 0), kv_lengths=lengths)


def attention_of_one_length(query, key, value):
    return ops.attention(query, key, value, causal=True)


def linear_attention(query, key, value, decay):
    return ops.linear_attention(query, key / 4, value, decay=-jnp.abs(decay), beta=None)[0]


def state_space(query, key, value, decay):
    return ops.state_space(query, key / 4, value, decay=-jnp.abs(decay), beta=None)[0]


def low_rank(x, down, up, rows):
    return ops.low_rank(x, down, up, jnp.ones(3), rows)


def paged_attention(query, pages, tables, lengths, starts):
    placed = {"block_tables": tables % 8, "kv_lengths": lengths + 12, "query_starts": starts}
    return ops.paged_attention(query, pages, pages, **placed)


# Axes of each operand: b, s and t are symbolic. Integers are drawn from 0 to 3; * are starts.
CALLS = {
    "norm, linear, gated_linear_unit, rope": (block, "b s 16 | 16 | 16 16 | 16 16 | int b s"),
    "linear_cross_entropy": (ops.linear_cross_entropy, "b s 16 | 16 8 | int b s"),
    "attention": (attention, "b s 4 16 | b t 2 16 | b t 2 16 | int b"),
    "attention_of_one_length": (attention_of_one_length, "b 300 4 16 | b 300 2 16 | b 300 2 16"),
    "linear_attention": (linear_attention, "b s 2 8 | b s 2 8 | b s 2 8 | b s 2"),
    "state_space": (state_space, "b s 1 8 | b s 1 8 | b s 2 8 | b s 2"),
    "ragged_dot": (ops.ragged_dot, "s 16 | 4 16 8 | int 4"),
    "low_rank": (low_rank, "b s 16 | 3 16 2 | 3 2 8 | int b"),
    "paged_attention": (paged_attention, "s 4 16 | 8 2 4 16 | int b 4 | int b | * b+1"),
}
SIZES = {"b": 3, "b+1": 4, "s": 37, "t": 70}
FEW_ROWS = {"s": 3}


def specs(form, sizes):
    """The kind of each operand and its shape, symbolic if no sizes are given."""
    scope = export.SymbolicScope()
    for text in form.split(" | "):
        kind, axes = ("float", text) if text[0] not in "i*" else text.split(maxsplit=1)
        shape = export.symbolic_shape(axes.replace(" ", ","), scope=scope)
        yield kind, shape if sizes is None else tuple(sizes.get(str(axis)) or int(axis) for axis in axes.split())


def drawn(form, sizes):
    rng = np.random.default_rng(0)
    for kind, shape in specs(form, sizes):
        if kind == "*":
            yield jnp.linspace(0, sizes["s"], *shape).astype(jnp.int32)
        else:
            yield jnp.asarray(rng.normal(scale=0.3, size=shape) if kind == "float" else rng.integers(0, 4, shape))


# Without them, one op of each form: state_space is built as linear_attention is, and attention has another call.
SIMILAR = ("attention_of_one_length", "state_space")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SIMILAR else ()) for name in CALLS]
)
def test_a_call_with_symbolic_sizes_computes_what_one_with_numbers_does(name):
    function, form = CALLS[name]
    kinds, shapes = zip(*specs(form, None), strict=True)
    floats = tuple(place for place, kind in enumerate(kinds) if kind == "float")

    def both(*arrays):
        return function(*arrays), jax.grad(lambda *given: jnp.sum(function(*given) ** 2), floats)(*arrays)

    dtypes = [jnp.float32 if kind == "float" else jnp.int32 for kind in kinds]
    exported = export.export(jax.jit(both))(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    for sizes in (SIZES, FEW_ROWS) if name == "ragged_dot" else (SIZES,):
        arrays = tuple(drawn(form, sizes))
        found, expected = exported.call(*arrays), jax.jit(both)(*arrays)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4), found, expected)


def test_an_implementation_that_is_named_is_refused_for_symbolic_sizes():
    own = OpImplementation("linear", "own", lambda x, weight, *, bias, preferred_dtype, requested: (x @ weight, {}))
    arrays = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32), jnp.ones((4, 2))
    with pytest.raises(UnsupportedOp, match="sizes are symbolic, which only the reference supports"):
        export.export(jax.jit(lambda *given: ops.linear(*given, implementation=own)))(*arrays)
