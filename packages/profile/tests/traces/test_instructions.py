"""The line and the layer of an instruction are the user's, not those of what it calls or of what called the program."""

from dataclasses import replace

import pytest

from stack_profile.traces.instructions import Frame, Instruction, called_by

USER = "/home/me/model.py"
OPTAX = "/venv/lib/python3.12/site-packages/optax/update.py"
CYCLOPTS = "/venv/lib/python3.12/site-packages/cyclopts/core.py"
CORE = "/venv/lib/python3.12/site-packages/stack_core/ops/dispatch/dispatch.py"
TRAIN = "/home/me/stack/packages/train/src/stack_train/step.py"  # installed for development
CALLERS = (
    Frame(TRAIN, 1, "train"),
    Frame(CYCLOPTS, 2, "App.__call__"),
    Frame("/venv/bin/stack", 3, "<module>"),
)


OUTER = len(CALLERS)


def instruction(*frames, op_name="jit(step)/add", outer=OUTER):
    return Instruction(1, "add.1", "add", "main", op_name, frames, outer, "own", False, frozenset({"add"}), (), "", "")


def test_a_user_s_line_is_the_innermost_outside_of_packages_and_the_package_s_own_is_known():
    op = (Frame(CORE, 10, "run"), Frame(CORE.replace("dispatch/dispatch", "definitions/linear"), 76, "linear"))
    found = instruction(*op, Frame(USER, 20, "Mlp.__call__"), Frame(TRAIN, 30, "step"), *CALLERS)
    assert (str(found.source()), str(found.package_source)) == (f"{USER}:20", "stack_core/ops/definitions/linear.py:76")
    own = instruction(Frame(USER, 20, "step"), *CALLERS)
    assert (str(own.source()), own.package_source) == (f"{USER}:20", None)


@pytest.mark.parametrize("innermost", [CORE, OPTAX])
def test_a_program_without_a_user_s_line_is_of_the_package_whose_function_was_compiled(innermost):
    found = instruction(Frame(innermost, 10, "run"), Frame(TRAIN, 20, "update"), Frame(TRAIN, 30, "step"), *CALLERS)
    path = innermost.partition("site-packages/")[2]
    assert (str(found.source()), str(found.package_source)) == ("stack_train/step.py:20", f"{path}:10")


def test_what_called_the_program_is_no_layer_though_its_function_is_not_on_the_stack():
    """JAX traces some functions, such as those of custom gradients, outside of the frames of the compiled one."""
    inner = Frame(TRAIN, 5, "Block.__call__")
    assert instruction(inner, *CALLERS).layer == "Block"
    assert instruction(inner, Frame(TRAIN, 30, "step"), *CALLERS, outer=0).layer == "Block"


def test_neither_the_machinery_of_ops_nor_a_config_is_a_layer():
    op = (Frame(CORE, 1, "Forward.__call__"), Frame(CORE, 2, "linear_cross_entropy"))
    objective = (Frame(TRAIN, 3, "CausalLMConfig.__call__"), Frame(TRAIN, 4, "step"))
    assert instruction(*op, *objective, *CALLERS).layer == ""
    assert instruction(*op, Frame(TRAIN, 5, "Decoder.__call__"), *objective, *CALLERS).layer == "Decoder"


def test_scopes_around_classes_and_of_kernels_are_combined_with_the_classes():
    inside = (Frame(TRAIN, 5, "Block.__call__"), Frame(TRAIN, 6, "Decoder.__call__"))
    decode = (*inside, Frame(TRAIN, 7, "Step.decode"), Frame(TRAIN, 30, "step"), *CALLERS)
    assert instruction(*decode, op_name="jit(step)/decode/while/body/add").layer == "decode/Decoder/Block"
    user = instruction(*inside, Frame(TRAIN, 30, "step"), *CALLERS, op_name="jit(step)/mlp/add")
    assert user.layer == "mlp"
    kernel = replace(user, op_name="jit(step)/jit(attend)/flash/call", opcodes=frozenset({"custom-call"}))
    assert kernel.layer == "Decoder/Block/flash"
    assert replace(kernel, op_name="jit(step)/Decoder/layers_0/call").layer == "Decoder/layers_0"


def test_callers_are_what_all_stacks_share_outside_of_the_compiled_function():
    def stacks(*functions):
        return [(Frame(USER, line, "f"), *(Frame(USER, 0, each) for each in functions), *CALLERS) for line in (1, 2)]

    assert called_by(stacks(), "jit(step)/add") == len(CALLERS)
    assert called_by(stacks("Model.__call__", "step", "loop"), "jit(step)/add") == len(CALLERS) + 1
    assert called_by([], "") == 0
    assert called_by([*stacks(), ()], "jit(step)/add") == 0
