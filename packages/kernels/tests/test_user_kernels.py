"""A function becomes an implementation, or the message says what does not fit."""

import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import stack_kernels
from stack_core import ops
from stack_core.abi.errors import ArgumentError, UnknownName
from stack_core.abi.ops import OpCall, OpImplementation
from stack_kernels.user_kernels import implementation


@dataclass(frozen=True)
class Split:
    parts: int


@dataclass
class Thawed:
    parts: int


@dataclass(frozen=True)
class Nested:
    sizes: tuple[int, ...]


def gated(x, w_gate, w_up, *, activation, config, **others):
    gates = [jax.nn.silu(x @ part) for part in jnp.split(w_gate, config.parts, axis=1)]
    return jnp.concatenate(gates, axis=1) * (x @ w_up)


def test_the_function_runs_where_it_is_named_with_its_first_config():
    mine = implementation("gated_linear_unit", name="mine", configs=[Split(2), Split(1)])(gated)
    assert isinstance(mine, OpImplementation)
    assert (mine.op, mine.name, mine.backward, mine.priority) == ("gated_linear_unit", "mine", None, 1)
    call = OpCall("gated_linear_unit", {}, {})
    assert (mine.default(call, None), mine.space(call, None)) == (Split(2), (Split(2), Split(1)))
    x, w = jnp.ones((3, 4)), jnp.ones((4, 6))
    jaxpr = jax.make_jaxpr(lambda x: ops.gated_linear_unit(x, w, w, implementation=mine))(x)
    assert str(jaxpr).count("dot_general") == 3


def test_a_call_may_have_no_config():
    mine = implementation("gated_linear_unit", name="mine", configs=lambda call, chip: ())(gated)
    assert mine.default(OpCall("gated_linear_unit", {}, {}), None) is None


def test_it_is_the_packages_own_name():
    assert stack_kernels.implementation is implementation
    with pytest.raises(AttributeError, match="has no attribute 'implementatoin'"):
        _ = stack_kernels.implementatoin


@pytest.mark.parametrize("op", ["attention", "rope", "paged_attention", "linear_attention", "collective_matmul"])
def test_every_op_takes_what_its_reference_takes(op):
    from stack_core.abi.plugins import registries

    reference = registries.ops[f"{op}/reference"]
    assert implementation(op, name="copy", residuals=["own"])(reference.forward).forward is reference.forward


def test_keywords_may_be_gathered():
    assert implementation("norm", name="mine")(lambda x, **others: x).default is None


ONE_MODULE = """
from stack_core import hookimpl, ops
from stack_kernels import implementation

STACK_ABI_MINOR = 0


@implementation("norm", name="halved")
def halved(x, **options):
    return x / 2


@hookimpl
def stack_register_ops(registry):
    registry.add("norm/halved", halved)


if __name__ == "__main__":
    import jax.numpy as jnp

    print(ops.norm(jnp.full(4, 3.0), jnp.ones(4), implementation="halved"))
"""


def test_a_plugin_may_be_one_module(tmp_path):
    (tmp_path / "one_module.py").write_text(ONE_MODULE)
    (metadata := tmp_path / "one_module-1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: one-module\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stack.plugins.v1]\none-module = one_module\n")
    run = subprocess.run(
        [sys.executable, "-m", "one_module"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout, run.returncode) == ("[1.5 1.5 1.5 1.5]\n", 0), run.stderr


def test_an_unknown_op_is_named_with_its_neighbours():
    with pytest.raises(UnknownName, match=r"Unknown op 'atention'. Did you mean 'attention'.* There are: attention,"):
        implementation("atention", name="mine")


@pytest.mark.parametrize(
    ("function", "configs", "message"),
    [
        (
            lambda x, w_gate, w_up: x,
            (),
            "it lacks bias_gate, bias_up, activation, limit, up_offset. Expected, all passed by name: x, w_gate, ",
        ),
        (gated, (), "nothing is passed as config"),
        (
            lambda x, w_gate, w_up, *, activation: x,
            (Split(1),),
            "it lacks bias_gate, bias_up, limit, up_offset, config",
        ),
        (
            lambda x, w_gate, w_up, *, activatoin="silu": x,
            (),
            "up_offset; nothing is passed as activatoin Did you mean 'activation'?",
        ),
        (lambda x, /, w_gate, w_up, *, activation: x, (), "x must not be positional-only"),
    ],
)
def test_parameters_that_are_not_the_ops_are_named(function, configs, message):
    with pytest.raises(ArgumentError) as refused:
        implementation("gated_linear_unit", name="mine", configs=configs)(function)
    assert "implementation 'mine' of 'gated_linear_unit': " in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"configs": (Split(1), Nested((1,)))}, "configs are of several types, Nested, Split; expected one"),
        ({"configs": (Thawed(1),)}, r"config Thawed\(parts=1\) is not an instance of a frozen dataclass"),
        ({"configs": (Split,)}, "is not an instance of a frozen dataclass"),
        ({"configs": ({"parts": 1},)}, r"config \{'parts': 1\} is not an instance of a frozen dataclass"),
        ({"configs": (Nested((1, 2)),)}, r"comes back from a tuned table as Nested\(sizes=\[1, 2\]\)"),
        ({"configs": (Split(jnp.float32),)}, "cannot be kept in a tuned table"),
        ({"supports": lambda call: True}, r"supports is .*; expected a function of \(call, chip, config\): too many"),
        ({"backward": lambda a, o, y, r, c, requested: {}, "configs": (Split(1),)}, "unexpected keyword.*config"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ArgumentError, match=message):
        implementation("gated_linear_unit", name="mine", **settings)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"before": "reference"}, "makes a string precede others"),
        ({"before": ("mine",)}, "makes itself precede others"),
        ({"before": ("reference",), "priority": -1}, "only where it is named"),
    ],
)
def test_what_an_implementation_cannot_precede_is_refused(fields, problem):
    with pytest.raises(ArgumentError, match=problem):
        implementation("gated_linear_unit", name="mine", **fields)
