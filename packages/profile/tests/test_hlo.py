"""Instructions know the Python lines and the scopes that asked for them."""

import jax
import jax.numpy as jnp
import pytest

from stack_profile.errors import TraceError
from stack_profile.hlo import read_program


def layer(x, weight):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ weight), None


class Model:
    def __call__(self, x, weights):
        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]


def loss(weights, x):
    return jnp.sum(Model()(x, weights) ** 2)


@pytest.fixture(scope="module")
def proto(build):
    weights, x = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32)
    return build.hlo_proto(jax.jit(jax.grad(loss)).lower(weights, x).compile())


@pytest.fixture(scope="module")
def program(proto):
    return read_program(proto, 7)


def running(program):
    passive = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
    return [each for each in program.instructions.values() if not each.fused and each.opcode not in passive]


def test_every_instruction_that_runs_has_a_line_of_this_file(program):
    sources = [instruction.source() for instruction in running(program)]
    assert len(sources) > 10
    assert {source.file for source in sources if source} == {__file__}
    assert all(source is not None for source in sources)


def test_products_of_the_backward_pass_belong_to_the_forward_scope(program):
    line = layer.__code__.co_firstlineno + 2
    products = [each for each in program.instructions.values() if each.opcode == "dot"]
    assert {each.scope.path for each in products} == {"mlp"}
    assert {each.source().line for each in products} == {line}
    assert {each.scope.direction for each in products} >= {"forward", "backward"}


def test_without_named_scopes_layers_are_the_classes_that_are_called(program):
    (loop, *_) = [each for each in program.instructions.values() if each.opcode == "while"]
    assert loop.scope.path == ""
    assert loop.layer == "Model"
    assert loop.source().function.endswith("Model.__call__")


def test_the_innermost_line_of_a_folder_can_be_asked_for(program):
    (loop, *_) = [each for each in program.instructions.values() if each.opcode == "while"]
    assert loop.source(within=__file__) == loop.source()
    assert loop.source(within="/nowhere") is None


def test_what_xla_inserted_takes_the_lines_of_what_it_is_for(program):
    inserted = [each for each in running(program) if each.origin != "own"]
    assert {each.origin for each in inserted} <= {"fused", "operand", "user", "caller"}
    assert all(each.frames for each in inserted)


def test_costs_are_read_from_the_same_module(program):
    assert program.module is not None
    assert set(program.module.entry.instructions) <= set(program.instructions)


def test_a_damaged_program_is_refused(proto):
    for damaged in (b"", proto[:2000], b"\x0b" + proto):
        with pytest.raises(TraceError, match="7"):
            read_program(damaged, 7)
