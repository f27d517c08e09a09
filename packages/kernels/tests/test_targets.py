"""What is traced for a chip that is not at hand gets the implementations of that chip."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips.targets import Target, use_target
from stack_core.testing import op_checks

REGISTERED = [entry.name for entry in registries.ops.entries() if entry.provider == "kernels"]
FOR_CPUS = [name for name in REGISTERED if name.rpartition("/")[2].startswith(("xla_cpu", "jit_"))]
OPS = sorted({name.partition("/")[0] for name in FOR_CPUS})


# Its forward pass has limits, and no backward pass of its own.
IN_PART = {"paged_attention": "slot_major_decode"}


def call_of(op):
    """A call of the op's contract suite, the first unless another is named, as a function of its arrays."""
    case = next(check.case for check in op_checks(op) if IN_PART.get(op) in (None, check.case.name))
    arrays = case.arrays(np.random.default_rng(0))
    arrays = jax.tree.map(lambda x: jnp.asarray(x, "float32" if x.dtype == np.float64 else None), dict(arrays))
    return (lambda arrays: case.call(getattr(ops, op), arrays, case.options)), arrays


def chosen(op, chip):
    function, arrays = call_of(op)
    (call,) = ops.explain(function, arrays, chip=chip)
    return {call.forward.implementation.name, call.backward.implementation.name}


# Megablox asks which TPU is at hand, as the oldest multiply no bf16; `_multiply` says why it has to be let.
ASKS = "jax.experimental.pallas.ops.tpu.megablox.common"


@pytest.fixture
def no_devices(monkeypatch):
    """Whoever asks what is at hand fails."""

    def refuse(name, real):
        if sys._getframe(1).f_globals["__name__"] != ASKS:
            pytest.fail(f"jax.{name} was asked")
        return real()

    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, functools.partial(refuse, name, getattr(jax, name)))


@pytest.mark.covering
@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["v5p", "v6e", "h200"])
def test_an_accelerator_gets_nothing_that_is_for_cpus(op, kind):
    assert not {f"{op}/{name}" for name in chosen(op, registries.chips[kind])} & set(FOR_CPUS)


@pytest.mark.parametrize("op", [op for op in OPS if f"{op}/xla_cpu" in FOR_CPUS])
def test_a_cpu_gets_what_is_for_cpus(op):
    of_kernels = {name for name in chosen(op, None) if f"{op}/{name}" in FOR_CPUS}
    assert of_kernels
    assert chosen(op, None) - of_kernels == ({"reference"} if op in IN_PART else set())


def check_compiles(op, target):
    function, arrays = call_of(op)
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
    with use_target(target):
        jax.jit(function).lower(structs).compile()


@pytest.mark.tpu_aot
@pytest.mark.parametrize("op", OPS)
def test_every_op_compiles_for_a_tpu(op):
    check_compiles(op, Target("v6e:1x1"))


@pytest.mark.gpu_aot
@pytest.mark.parametrize("op", OPS)
def test_every_op_compiles_for_a_gpu(op):
    check_compiles(op, Target("h200:1x1x1"))


def kernels_for_h100(function, *shapes):
    """Counts the fusions, products, reductions and calls of the program."""
    target = Target("h100:1x1x1")
    place = jax.sharding.SingleDeviceSharding(target.devices[0])
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    with use_target(target):
        text = jax.jit(function).lower(*structs).compile().as_text()
    return len(re.findall(r" (?:fusion|custom-call|dot|reduce|copy)\(", text.partition("ENTRY")[2]))


@pytest.mark.gpu_aot
def test_xla_fuses_norms_and_gated_units_for_gpus():
    """Why the references of these ops are the default there without Triton."""

    def norm(x, residual, scale):
        return ops.norm(x, scale, residual=residual, implementation="reference")

    def gradients(x, residual, scale, *cotangents):
        of_x, _, of_scale = jax.vjp(norm, x, residual, scale)[1](cotangents)  # the residual's gradient equals x's
        return of_x, of_scale

    def gated(x, w_gate, w_up):
        return ops.gated_linear_unit(x, w_gate, w_up, implementation="reference")

    rows = (16_384, 1024)
    assert kernels_for_h100(norm, rows, rows, (1024,)) <= 2
    assert kernels_for_h100(gradients, rows, rows, (1024,), rows, rows) <= 4
    assert kernels_for_h100(gated, rows, (1024, 4096), (1024, 4096)) == 3
