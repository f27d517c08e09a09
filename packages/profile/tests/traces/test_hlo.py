"""Instructions know the Python lines and the scopes that asked for them."""

import jax
import jax.numpy as jnp
import pytest

from stack_profile.errors import TraceError
from stack_profile.traces.hlo import read_program


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


def module(build, *instructions):
    """An HloProto of one computation, whose instructions are (name, opcode, metadata, further fields)."""
    parts = [
        (2, build.message((1, name), (2, opcode), (7, metadata), (35, place), *more))
        for place, (name, opcode, metadata, *more) in enumerate(instructions, 1)
    ]
    return build.message((1, build.message((1, "jit_f"), (3, build.message((1, "main"), (5, 9), *parts)))))


def test_older_programs_have_lines_and_no_stacks(build):
    line = build.message((2, "jit(f)/mlp/add"), (3, "model.py"), (4, 12))
    program = read_program(module(build, ("add.1", "add", line), ("copy.1", "copy", b"", (36, 1))), 7)
    assert [str(program.instructions[name].source()) for name in ("add.1", "copy.1")] == ["model.py:12"] * 2
    assert program.instructions["copy.1"].origin == "operand"


def test_programs_that_contradict_themselves_are_read(build):
    """A fusion of a computation that is missing, one that is in itself, an operand that is not there."""
    place = build.message((3, "model.py"), (4, 1))
    own = ("call.1", "call", b"", (38, 9), (36, 77))
    program = read_program(module(build, ("add.1", "add", place), ("fusion.1", "fusion", b"", (38, 5)), own), 7)
    origins = {name: each.origin for name, each in program.instructions.items()}
    assert origins == {"add.1": "own", "fusion.1": "none", "call.1": "none"}


def test_a_damaged_program_is_refused(proto):
    for damaged in (b"", proto[:2000], b"\x0b" + proto):
        with pytest.raises(TraceError, match="7"):
            read_program(damaged, 7)
