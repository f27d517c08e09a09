"""FLOPs counted from jaxprs equal those worked out by hand, and XLA's where it counts the same things."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, PartitionSpec

from stack_core import ops
from stack_core.abi.ops import OpImplementation
from stack_core.chips import Chip
from stack_core.programs.flops import Flops, count_flops, model_flops_per_step

M, K, N = 3, 5, 7
PRODUCT = 2 * M * K * N


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def square(x):
    return x @ x


SQUARE = 2 * 4**3


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("mk,kn->mn", ((M, K), (K, N)), PRODUCT),
        ("bmk,bkn->bmn", ((2, M, K), (2, K, N)), 2 * PRODUCT),
        ("bqhd,bkhd->bhqk", ((2, 6, 4, 8), (2, 9, 4, 8)), 2 * 2 * 4 * 6 * 9 * 8),
        ("mkl,klm->m", ((3, 4, 5), (4, 5, 3)), 2 * 3 * 4 * 5),
        ("m,n->mn", ((M,), (N,)), 2 * M * N),
        ("mk,kn->mn", ((0, K), (K, N)), 0),
    ],
)
def test_products(equation, shapes, expected):
    flops = count_flops(lambda x, y: jnp.einsum(equation, x, y), *(zeros(*shape) for shape in shapes))
    assert flops.total == expected
    assert flops.uncounted == ()


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_a_scan_of_batched_products(batch, rows, inner, columns, length):
    def scanned(x, y):
        return jax.lax.scan(lambda total, _: (total + jnp.einsum("bmk,bkn->bmn", x, y), None), out, length=length)[0]

    out = jnp.zeros((batch, rows, columns))
    flops = count_flops(scanned, zeros(batch, rows, inner), zeros(batch, inner, columns))
    assert flops.total == length * 2 * batch * rows * inner * columns


def test_dtypes_are_those_of_the_operands_and_the_wider_where_they_differ():
    def mixed(x, y, z):
        first = jax.lax.dot(x, x, preferred_element_type=jnp.float32)
        second = jax.lax.dot_general(y, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        third = jax.lax.dot_general(x, z, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return first, second, third

    args = zeros(4, 4, dtype=jnp.bfloat16), zeros(4, 4, dtype=jnp.int8), zeros(4, 4)
    assert count_flops(mixed, *args).by_dtype == {"bfloat16": SQUARE, "int8": SQUARE, "float32": SQUARE}


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 3, 8, 9), (4, 3, 3, 3)), {"padding": "VALID"}),
        (((2, 3, 8, 9), (4, 3, 3, 2)), {"padding": "SAME", "window_strides": (2, 1)}),
        (((2, 4, 8, 9), (6, 2, 3, 3)), {"padding": "SAME", "feature_group_count": 2}),
        (((2, 3, 8, 9), (4, 3, 3, 3)), {"padding": ((2, 1), (0, 3)), "rhs_dilation": (2, 3)}),
        (((2, 3, 4, 5), (4, 3, 3, 3)), {"padding": ((2, 2), (1, 2)), "lhs_dilation": (2, 3)}),
        (((4, 3, 6, 5), (4, 3, 3, 3)), {"padding": "VALID", "batch_group_count": 2}),
        (((2, 3, 8), (4, 3, 5)), {"padding": "SAME"}),
    ],
)
def test_convolutions_count_what_a_direct_loop_multiplies(shapes, options):
    options = {"window_strides": (1,) * (len(shapes[0]) - 2), **options}

    def convolution(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, **options)

    # With ones everywhere, each result is the number of multiplications that made it.
    multiplications = np.sum(convolution(*(jnp.ones(shape) for shape in shapes)))
    assert count_flops(convolution, *(zeros(*shape) for shape in shapes)).total == 2 * multiplications


def test_convolutions_count_as_xla_does():
    def convolution(x, kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dimensions)

    args = zeros(2, 9, 8, 3), zeros(3, 3, 3, 4)
    assert count_flops(convolution, *args).total == jax.jit(convolution).lower(*args).cost_analysis()["flops"]


def test_ragged_products_meet_one_group_a_row():
    def ragged(x, weights, sizes):
        return jax.lax.ragged_dot(x, weights, sizes)

    args = zeros(8, K), zeros(3, K, N), zeros(3, dtype=jnp.int32)
    assert count_flops(ragged, *args).total == 2 * 8 * K * N


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_ragged_dot_counts_its_rows_and_less_than_a_tile_a_group(groups):
    rows, d_in, d_out = 2048, 24, 40
    args = zeros(rows, d_in), zeros(groups, d_in, d_out), zeros(groups, dtype=jnp.int32)
    needed = 2 * rows * d_in * d_out
    multiplied = functools.partial(ops.ragged_dot, implementation="reference")
    forward = count_flops(multiplied, *args)
    assert forward.uncounted == ()
    assert needed <= forward.total <= 1.5 * needed
    gradient = jax.value_and_grad(lambda *args: multiplied(*args).sum(), argnums=(0, 1))
    assert count_flops(gradient, *args).total == 3 * forward.total


def test_linear_attention_counts_three_products_a_token():
    tokens, gates = zeros(2, 64, 3, 8), zeros(2, 64, 3)
    flops = count_flops(lambda x, g: ops.linear_attention(x, x, x[..., :5], decay=g, beta=g), tokens, gates)
    assert flops.by_dtype == {"float32": 3 * 2 * (2 * 64 * 3) * 8 * 5}


def test_collective_matmul_counts_what_all_devices_do():
    mesh = jax.sharding.AbstractMesh((4,), ("x",), (AxisType.Auto,))
    columns, rows, whole = PartitionSpec(None, "x"), PartitionSpec("x", None), 2 * 16 * 8 * 12
    for kind, specs in (("all_gather", (rows, columns, columns)), ("reduce_scatter", (columns, rows, rows))):
        product = functools.partial(ops.collective_matmul, axis_name="x", kind=kind)
        sharded = jax.shard_map(product, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])
        assert count_flops(sharded, zeros(16, 8), zeros(8, 12)).total == whole


def test_loops_and_branches():
    x = zeros(4, 4)
    assert count_flops(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: square(x), x), x).total == 5 * SQUARE
    branches = [square, lambda x: square(square(x)), lambda x: x]
    assert count_flops(lambda x: jax.lax.switch(1, branches, x), x).total == 2 * SQUARE
    flops = count_flops(lambda x: jax.lax.map(lambda row: square(row * x), jnp.ones((6, 4))), x)
    assert flops.total == 6 * SQUARE


def test_trips_of_a_while_loop_are_reported_and_not_guessed():
    def loop(x):
        return square(jax.lax.while_loop(lambda x: square(x).sum() < 3, square, x))

    flops = count_flops(loop, zeros(4, 4))
    assert flops.total == SQUARE
    assert flops.uncounted == (f"while loop of {2 * SQUARE} FLOPs per trip, unknown trip count",)
    assert count_flops(lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, jnp.sin, x), zeros(4)).uncounted == ()


def test_a_while_loop_is_reported_from_inside_other_loops_and_branches():
    def inner(x):
        return jax.lax.while_loop(lambda x: x.sum() < 3, square, x)

    def outer(x):
        return jax.lax.cond(
            x.sum() > 0, lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, length=2)[0], square, x
        )

    flops = count_flops(outer, zeros(4, 4))
    assert flops.total == SQUARE
    assert flops.uncounted == (f"while loop of {SQUARE} FLOPs per trip, unknown trip count",)
    nested = count_flops(lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, inner, x), zeros(4, 4))
    assert nested.uncounted == flops.uncounted


@jax.custom_vjp
def with_own_backward(x):
    return square(x)


with_own_backward.defvjp(lambda x: (square(x), x), lambda x, cotangent: (square(square(cotangent)),))


@jax.custom_jvp
def with_own_tangent(x):
    return square(x)


@with_own_tangent.defjvp
def _(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return square(x), tangent @ x + x @ tangent


CALLS = {
    "plain": (square, 1, 3),
    "jit": (jax.jit(square), 1, 3),
    "jit in jit": (jax.jit(lambda x: jax.jit(square)(square(x))), 2, 6),
    "vmap": (jax.vmap(lambda row, x: row @ x, (0, None)), 1, 3),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(square(x))), 1, 4),
    "custom vjp": (with_own_backward, 1, 3),
    "custom jvp": (with_own_tangent, 1, 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_forward_and_with_their_gradient(name):
    function, forward, with_gradient = CALLS[name]
    args = [zeros(4, 4)] * (2 if name == "vmap" else 1)
    assert count_flops(function, *args).total == forward * SQUARE

    def loss(args):
        return function(*args).sum()

    assert count_flops(jax.value_and_grad(loss), args).total == with_gradient * SQUARE


def test_scan_inside_remat_inside_grad():
    layers, rows, width = 3, 6, 4
    product = 2 * rows * width * width

    def loss(weights, x, remat):
        def layer(x, weight):
            return jnp.tanh(x @ weight), None

        return remat(lambda weights, x: jax.lax.scan(layer, x, weights)[0])(weights, x).sum()

    args = zeros(layers, width, width), zeros(rows, width)
    gradient = jax.grad(loss, argnums=(0, 1))

    def count(function, remat):
        return count_flops(lambda weights, x: function(weights, x, remat), *args).total

    assert count(loss, jax.checkpoint) == layers * product
    assert count(gradient, lambda function: function) == 3 * layers * product
    assert count(gradient, jax.checkpoint) == 4 * layers * product
    assert model_flops_per_step(lambda *args: loss(*args, jax.checkpoint), *args).total == 3 * layers * product


def test_shard_map_counts_every_device():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",), axis_types=(AxisType.Auto,))
    abstract = jax.sharding.AbstractMesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    spec = PartitionSpec("x")

    def over(mesh, axes):
        return jax.shard_map(
            lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )

    assert count_flops(over(mesh, {"x"}), zeros(8, 4)).total == 2 * 8 * 8 * 4
    assert count_flops(over(abstract, {"x"}), zeros(8, 4)).total == 2 * (2 * 4 * 4 * 4)
    assert count_flops(over(abstract, {"x", "y"}), zeros(8, 4)).total == 8 * (2 * 4 * 4 * 4)


def test_a_pallas_kernel_counts_every_cell_of_its_grid():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    call = pl.pallas_call(kernel, grid=(2, 3), out_shape=zeros(4, 4), interpret=True)
    assert count_flops(call, zeros(4, 4)).total == 6 * SQUARE


@pytest.mark.parametrize("estimate", [None, 1_000])
def test_a_pallas_kernel_over_a_grid_that_only_its_run_knows_counts_what_it_estimates(estimate):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    cost = estimate and pl.CostEstimate(flops=estimate, transcendentals=0, bytes_accessed=0)
    call = lambda cells, x: pl.pallas_call(
        kernel, grid=(cells,), out_shape=zeros(4, 4), cost_estimate=cost, interpret=True
    )(x)
    flops = count_flops(call, zeros(dtype=jnp.int32), zeros(4, 4))
    if estimate is None:
        assert flops.total == 0 and "Pallas kernel with a dynamic grid" in flops.uncounted[0]
    else:
        assert flops == Flops({"float32": estimate})


@pytest.mark.parametrize("name", ["mpmd_map", "dot_product_attention_fwd_wrapper"])
def test_the_model_flops_of_a_kernel_without_visible_products_are_those_of_the_reference(name):
    primitive = jax.extend.core.Primitive(name)
    primitive.def_abstract_eval(lambda x, weight: jax.core.ShapedArray((*x.shape[:-1], weight.shape[-1]), x.dtype))

    def forward(x, weight, *, bias, preferred_dtype, requested):
        return primitive.bind(x, weight), {}

    kernel = OpImplementation(op="linear", name="hidden", forward=forward)
    apply = functools.partial(ops.linear, implementation=kernel)
    counted = count_flops(apply, zeros(M, K), zeros(K, N))
    assert counted == Flops({}, (f"kernel {name}, whose products are not visible",))
    assert model_flops_per_step(apply, zeros(M, K), zeros(K, N)) == Flops({"float32": 3 * PRODUCT})


def _loops_over_tiles(tiles, x, weight):
    """Multiplies by a kernel that loops over as many tiles as its operand says, as grouped products do."""

    def kernel(tiles_ref, x_ref, weight_ref, out_ref):
        def multiply(_):
            out_ref[...] = x_ref[...] @ weight_ref[...]

        jax.lax.fori_loop(0, tiles_ref[0], lambda _, state: multiply(state), None)

    return pl.pallas_call(kernel, out_shape=zeros(M, N), interpret=True)(tiles, x, weight)


def _over_a_grid(tiles, x, weight):
    """Multiplies by a kernel over a grid that only its run knows, without an estimate."""

    def kernel(x_ref, weight_ref, out_ref):
        out_ref[...] = x_ref[...] @ weight_ref[...]

    return pl.pallas_call(kernel, grid=(tiles[0],), out_shape=zeros(M, N), interpret=True)(x, weight)


@pytest.mark.parametrize("multiply", [_loops_over_tiles, _over_a_grid])
def test_the_model_flops_of_a_kernel_of_unknown_length_are_those_of_the_reference(multiply):
    def forward(x, weight, *, bias, preferred_dtype, requested):
        return multiply(jnp.ones(1, jnp.int32), x, weight), {}

    kernel = OpImplementation(op="linear", name="hidden", forward=forward)
    apply = functools.partial(ops.linear, implementation=kernel)
    (line,) = count_flops(apply, zeros(M, K), zeros(K, N)).uncounted
    assert f"of {PRODUCT} FLOPs per trip, unknown trip count" in line
    assert model_flops_per_step(apply, zeros(M, K), zeros(K, N)) == Flops({"float32": 3 * PRODUCT})


def test_a_linear_solver_counts_without_its_derivatives():
    assert count_flops(lambda x: jnp.linalg.solve(x, x), zeros(4, 4)).total == 0


def test_sums_and_multiples():
    first, second = Flops({"float32": 2}, ("a",)), Flops({"float32": 3, "int8": 5}, ("b",))
    assert first + second == Flops({"float32": 5, "int8": 5}, ("a", "b"))
    assert second * 2 == Flops({"float32": 6, "int8": 10}, ("b",))
    assert second * 0 == Flops()


def test_the_ideal_time_is_none_where_it_is_not_known():
    chip = Chip(
        kind="test",
        unit="device",
        peak_flops={"float32": 10.0, "int8": 20.0},
        hbm_bytes=None,
        hbm_bandwidth_bytes_s=None,
        on_chip_bytes=None,
        link_bandwidth_bytes_s=None,
        provenance="made up",
    )
    assert Flops({"float32": 100, "int8": 100}).ideal_s(chip) == 15.0
    assert Flops({"float32": 100, "int8": 100}).ideal_s(chip, units=2) == 7.5
    assert Flops({"float32": 100, "bfloat16": 1}).ideal_s(chip) is None
    assert Flops({"float32": 100}, ("while loop",)).ideal_s(chip) is None
    assert Flops().ideal_s(chip) == 0.0


def test_a_foreign_function_counts_what_it_says():
    def product(x, **attributes):
        call = jax.ffi.ffi_call("test_foreign", jax.ShapeDtypeStruct((8,), jnp.float32))
        return call(x, **attributes)

    said = functools.partial(product, flops=np.int64(2**40), flops_dtype="bfloat16")
    assert count_flops(said, zeros(8)) == Flops({"bfloat16": 2**40})
    assert count_flops(product, zeros(8)) == Flops()
