import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.plugins import registries
from stack_kernels.bench.cases import CASES, make_arrays
from stack_kernels.bench.run import Task, tasks

SMALL = [case for case in CASES if case.model == "66m"]


class Ones(np.random.Generator):
    """Draws ones, which take no memory, for normal numbers."""

    def standard_normal(self, shape, dtype):
        return np.broadcast_to(dtype(1), shape)


def test_every_op_of_one_device_has_cases_of_both_sizes():
    expected = {name.partition("/")[0] for name in registries.ops.names()}
    expected -= {"collective_matmul", "exchange"}  # whose work is between devices
    for model in ("66m", "8b"):
        assert {case.op for case in CASES if case.model == model} == expected


def test_no_two_have_one_name():
    keys = [task.key for task in tasks(CASES, ["float32", "bfloat16"], ["", "reference"])]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.op} {case.name}")
def test_the_op_takes_the_call(case):
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == np.float32 else x.dtype),
        dict(case.arrays(Ones(np.random.PCG64(0)))),
    )
    direction = "gradient" if case.gradient else "forward"
    traced = jax.eval_shape(Task(case, "bfloat16", direction, "").call("reference"), arrays)
    assert len(jax.tree.leaves(traced)) > (1 if case.gradient else 0)


def test_arrays_are_drawn_alike_and_in_the_dtype():
    case = next(case for case in SMALL if case.name == "decode w8")
    one, other = (make_arrays(case, "bfloat16") for _ in range(2))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, one, other))
    assert (one["x"].dtype, one["weight"].values.dtype, one["weight"].scales.dtype) == ("bfloat16", "int8", "float32")
    product = one["x"].astype(jnp.float32) @ (one["weight"].values.astype(jnp.float32) * one["weight"].scales)
    assert np.std(product) == pytest.approx(512**0.5, rel=0.05), "a weight of unit variance, beside its rounding"
