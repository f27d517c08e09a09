"""Every implementation on eight devices; `test_on_eight_devices.py` runs this in a process that has them.

Each call is made twice over a mesh of data, fsdp and tensor: jitted with operands that lie on all devices, so that XLA
divides the work, and inside `jax.shard_map`, where every device has its part. Both give what one device gives. The
argument `all` makes every call in both ways and both dtypes, instead of by turns.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.ops import QView
from stack_core.abi.plugins import registries
from stack_core.testing import TOLERANCES, assert_close

RNG = np.random.default_rng(0)
DTYPES = ("float32", "bfloat16")
WAYS = ("divided", "in parts")
ROWS = ("data", "fsdp")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    values: Any
    scales: Any

    def __stack_qview__(self):
        return QView((1, 0), self.values, self.scales, None, "int8/tiled")


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
      function: takes the operands by position, and `implementation`.
      places: how XLA finds the operands; one that is not named is everywhere.
      parts: what of each operand a device has inside of `shard_map`, and `result` what of the result.
    """

    op: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    places: tuple[Any, ...]
    parts: tuple[Any, ...]
    result: Any


def normal(*shape, scale=1.0):
    return scale * RNG.normal(size=shape)


def integers(*values):
    return np.array(values, np.int32)


def int8(rows, columns, tiles):
    values = RNG.integers(-127, 128, (rows, columns), dtype=np.int8)
    return Int8(values, RNG.uniform(0.001, 0.002, (tiles, columns)).astype(np.float32))


SEGMENTS = np.repeat(integers([1] * 6 + [2] * 10), 8, axis=0)
HEADS = P(ROWS, None, "tensor", None)
CALLS = (
    Call(
        "attention",
        lambda q, k, v, sinks, segments, **o: ops.attention(
            q, k, v, sinks=sinks, segment_ids=segments, causal=True, window=(9, None), softcap=20.0, **o
        ),
        (normal(8, 16, 4, 8), normal(8, 16, 2, 8), normal(8, 16, 2, 8), normal(4), SEGMENTS),
        (P("data", "fsdp", "tensor"), P(ROWS, None, "tensor"), P(ROWS, None, "tensor"), P("tensor"), P("data")),
        (HEADS, HEADS, HEADS, P("tensor"), P(ROWS)),
        HEADS,
    ),
    Call(
        "attention",
        lambda q, k, v, bias, lengths, **o: ops.attention(q, k, v, bias=bias, kv_lengths=lengths, **o),
        (normal(8, 5, 4, 8), normal(8, 16, 2, 8), normal(8, 16, 2, 8), normal(1, 4, 1, 16), integers(*range(0, 16, 2))),
        (P("data", None, "tensor"), P("data", "fsdp"), P("data", "fsdp"), P(None, "tensor"), P()),
        (HEADS, HEADS, HEADS, P(None, "tensor"), P(ROWS)),
        HEADS,
    ),
    Call(
        "gated_linear_unit",
        ops.gated_linear_unit,
        (normal(8, 6, 32), normal(32, 24, scale=0.2), normal(32, 24, scale=0.2)),
        (P(ROWS), P("fsdp", "tensor"), P("fsdp", "tensor")),
        (P(ROWS), P(None, "tensor"), P(None, "tensor")),
        P(ROWS, None, "tensor"),
    ),
    Call(
        "gated_linear_unit",
        ops.gated_linear_unit,
        (normal(8, 6, 32), int8(32, 24, tiles=4), int8(32, 24, tiles=1)),
        (P(ROWS), Int8(P("fsdp", "tensor"), P("fsdp", "tensor")), Int8(P("fsdp", "tensor"), P(None, "tensor"))),
        (P(ROWS), P(None, "tensor"), P(None, "tensor")),
        P(ROWS, None, "tensor"),
    ),
    Call(
        "linear",
        lambda x, weight, bias, **o: ops.linear(x, weight, bias=bias, **o),
        (normal(8, 6, 32), normal(32, 24, scale=0.2), normal(24)),
        (P(ROWS), P("fsdp", "tensor"), P("tensor")),
        (P(ROWS), P(None, "tensor"), P("tensor")),
        P(ROWS, None, "tensor"),
    ),
    Call(
        "linear",
        ops.linear,
        (normal(8, 6, 32), int8(32, 24, tiles=4)),
        (P(ROWS), Int8(P("fsdp", "tensor"), P("fsdp", "tensor"))),
        (P(ROWS), P(None, "tensor")),
        P(ROWS, None, "tensor"),
    ),
    Call(
        "linear",
        ops.linear,
        (int8(8, 32, tiles=8), int8(32, 24, tiles=1)),
        (P(ROWS), Int8(P("fsdp", "tensor"), P(None, "tensor"))),
        (P(ROWS), P(None, "tensor")),
        P(ROWS, "tensor"),
    ),
    Call(
        "linear_attention",
        lambda q, k, v, decay, beta, state, **o: ops.linear_attention(
            q, k, v, decay=decay, beta=beta, initial_state=state, **o
        ),
        (
            *(normal(8, 9, 4, 8, scale=0.3) for _ in range(3)),
            -np.abs(normal(8, 9, 4)),
            RNG.uniform(size=(8, 9, 4)),
            normal(8, 4, 8, 8).astype(np.float32),
        ),
        (*[P(ROWS, None, "tensor")] * 5, P("data", "tensor")),
        (*[P(ROWS, None, "tensor")] * 5, P(ROWS, "tensor")),
        (P(ROWS, None, "tensor"), P(ROWS, "tensor")),
    ),
    Call(
        "linear_cross_entropy",
        partial(ops.linear_cross_entropy, reduction="none", z_loss=0.1, label_smoothing=0.1),
        (normal(8, 6, 32), normal(32, 50, scale=0.2), RNG.integers(0, 50, (8, 6), dtype=np.int32)),
        (P(ROWS), P("fsdp", "tensor"), P(ROWS)),
        (P(ROWS), P(), P(ROWS)),
        P(ROWS),
    ),
    Call(
        "linear_cross_entropy",
        lambda hidden, weight, labels, **o: ops.linear_cross_entropy(hidden, weight, labels, **o)[None],
        (normal(8, 6, 32), normal(32, 50, scale=0.2), np.repeat(integers([3, -100, 7, 49, -100, 0]), 8, axis=0)),
        (P(ROWS), P("fsdp", "tensor"), P(ROWS)),
        (P(), P(), P()),
        P(),
    ),
    Call(
        "norm",
        lambda x, scale, residual, **o: ops.norm(x, scale, residual=residual, **o),
        (normal(8, 6, 32), normal(32), normal(8, 6, 32)),
        (P(ROWS, "tensor"), P("fsdp"), P(ROWS, "tensor")),
        (P(ROWS, "tensor"), P(), P(ROWS, "tensor")),
        P(ROWS, "tensor"),
    ),
    Call(
        "paged_attention",
        lambda q, k, v, tables, lengths, starts, **o: ops.paged_attention(
            q, k, v, block_tables=tables, kv_lengths=lengths, query_starts=starts, **o
        ),
        (
            normal(8, 4, 8),
            normal(6, 2, 4, 8),
            normal(6, 2, 4, 8),
            integers([4, 1, 0], [5, 2, 0]),
            integers(9, 6),
            integers(0, 5, 6),
        ),
        (P(ROWS, "tensor"), P("data", "tensor"), P("data", "tensor"), P(), P(), P()),
        (P(None, "tensor"), P(None, "tensor"), P(None, "tensor"), P(), P(), P()),
        P(None, "tensor"),
    ),
    Call(
        "paged_attention",
        lambda q, k, v, tables, lengths, starts, sinks, **o: ops.paged_attention(
            q, k, v, block_tables=tables, kv_lengths=lengths, query_starts=starts, sinks=sinks, layout="pshd", **o
        ),
        (
            normal(2, 4, 8),
            normal(6, 4, 2, 8),
            normal(6, 4, 2, 8),
            integers([4, 1, 0], [5, 2, 0]),
            integers(9, 6),
            integers(0, 1, 2),
            normal(4),
        ),
        (P("data", "tensor"), P("data", None, "tensor"), P("data", None, "tensor"), P(), P(), P(), P("tensor")),
        (P(None, "tensor"), P(None, None, "tensor"), P(None, None, "tensor"), P(), P(), P(), P("tensor")),
        P(None, "tensor"),
    ),
    Call(
        "ragged_dot",
        ops.ragged_dot,
        (normal(40, 16), normal(4, 16, 24, scale=0.3), integers(11, 0, 17, 5)),
        (P(ROWS), P(None, "fsdp", "tensor"), P()),
        (P(), P(None, None, "tensor"), P()),
        P(None, "tensor"),
    ),
    Call(
        "rope",
        ops.rope,
        (normal(8, 6, 4, 8), np.repeat(np.arange(6, dtype=np.int32)[None], 8, axis=0)),
        (P(ROWS, None, "tensor"), P(ROWS)),
        (P(ROWS, None, "tensor"), P(ROWS)),
        P(ROWS, None, "tensor"),
    ),
)


def value_and_gradients(function, operands):
    """The output, and the gradients of all leaves that are floating."""
    leaves, structure = jax.tree.flatten(operands)
    moving = [index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of_moving(values):
        given = dict(zip(moving, values, strict=True))
        return function(*structure.unflatten(given.get(index, leaf) for index, leaf in enumerate(leaves)))

    output, vjp = jax.vjp(of_moving, [leaves[index] for index in moving])
    return output, vjp(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), output))


def assert_like_one_device(call, implementation, dtype, ways):
    """Raises UnsupportedOp where the implementation refuses the call."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    operands = jax.tree.map(lambda x: jnp.asarray(x, dtype if x.dtype == np.float64 else None), call.operands)
    named = partial(call.function, implementation=implementation)
    expected = jax.jit(partial(value_and_gradients, named))(operands)
    if "divided" in ways:
        shardings = jax.tree.map(partial(NamedSharding, mesh), call.places)
        divided = jax.jit(partial(value_and_gradients, named))(jax.device_put(operands, shardings))
        assert_close(divided, expected, TOLERANCES[dtype])
    if "in parts" in ways:
        mapped = jax.shard_map(named, mesh=mesh, in_specs=call.parts, out_specs=call.result)
        in_parts = jax.jit(partial(value_and_gradients, mapped))(operands)
        assert_close(in_parts, expected, TOLERANCES[dtype])


def run(name, *, every, first):
    """Makes an implementation's calls; without `every`, each in one dtype that it supports and one way, by turns."""
    op, _, implementation = name.partition("/")
    ran, refusals = 0, []
    for number, call in enumerate(call for call in CALLS if call.op == op):
        ways = WAYS if every else (WAYS[(number + first) // 2 % 2],)
        for dtype in DTYPES if (number + first) % 2 else DTYPES[::-1]:
            try:
                assert_like_one_device(call, implementation, dtype, ways)
            except UnsupportedOp as refusal:
                refusals.append(str(refusal))
                continue
            except AssertionError as error:
                error.add_note(f"{name}, {dtype}")
                raise
            ran += 1
            if not every:
                break
    is_for_one_device = all("several CPU devices" in refusal for refusal in refusals)
    assert ran or is_for_one_device, f"{name} supports none of the calls of its op; add one"


def gradients_on_explicit_axes():
    """Both gradients of a product sum over an axis that the mesh splits: over rows, and over outputs."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    shapes = (8, 6, 32), (32, 24), (32, 24)
    codes = jax.tree.map(jnp.asarray, int8(32, 24, tiles=4))
    rows, dense = P("data", None, None), P(None, "tensor")
    for op, implementation, dtype, in_codes in (
        (ops.linear, None, "float32", False),
        (ops.linear, None, "float32", True),
        (ops.linear, "reference", "bfloat16", False),
        (ops.gated_linear_unit, None, "float32", False),
    ):
        x, weight, other = (jnp.asarray(normal(*shape, scale=0.2), dtype) for shape in shapes)
        others = (other,) if op is ops.gated_linear_unit else ()
        call = partial(op, implementation=implementation)

        def loss(x, weight, call=call, others=others):
            return jnp.sum(jnp.square(call(x, weight, *others)), dtype="float32")

        gradients = jax.grad(loss, 0 if in_codes else (0, 1))
        given = (x, codes if in_codes else weight)
        expected = gradients(*given)
        with jax.set_mesh(mesh):
            places = rows, Int8(dense, dense) if in_codes else dense
            actual = gradients(*jax.device_put(given, jax.tree.map(partial(NamedSharding, mesh), places)))
        assert_close((None, actual), (None, expected), TOLERANCES[dtype])
        specs = [gradient.sharding.spec for gradient in jax.tree.leaves(actual)]
        assert specs == [rows, dense][: len(specs)], specs


def main():
    for place, name in enumerate(registries.ops.names()):
        is_reference = name.endswith("/reference")
        if not is_reference and "cpu" in (registries.ops[name].platforms or ("cpu",)):
            run(name, every="all" in sys.argv, first=place)


if __name__ == "__main__":
    if "all" not in sys.argv:
        gradients_on_explicit_axes()
    main()
