"""Op names in the forms of every supported JAX."""

import pytest

from stack_profile.traces.scopes import parse_op_name


@pytest.mark.parametrize(
    ("op_name", "path", "direction", "primitive"),
    [
        ("jit(step)/mlp/dot_general", "mlp", "forward", "dot_general"),
        ("jit(step)/jvp(mlp)/dot_general", "mlp", "forward", "dot_general"),
        ("jit(step)/transpose(jvp(mlp))/dot_general", "mlp", "backward", "dot_general"),
        ("jit(step)/jvp(model)/transpose(jvp(mlp/up))/mul", "model/mlp/up", "backward", "mul"),
        ("jit(f)/jvp()/while/body/closed_call/mlp/tanh", "mlp", "forward", "tanh"),
        ("jit(f)/jvp()/while/body/eval_jaxpr/mlp/tanh", "mlp", "forward", "tanh"),
        (
            "jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/dot_general",
            "mlp",
            "recomputed",
            "dot_general",
        ),
        ("jit(f)/while/body/jit(dynamic_index_in_dim)/dynamic_slice", "", "forward", "dynamic_slice"),
        ("jit(f)/attention/bhdq,bhqk->bhdk/dot_general", "attention", "forward", "dot_general"),
        ("jit(f)/a/mul;jit(f)/b/add", "a", "forward", "mul"),
        ("jit(f)/vmap(layers_0)/cond/branch_1_fun/exp", "layers_0", "forward", "exp"),
        ("weights[0]", "", "forward", "weights[0]"),
        ("", "", "forward", ""),
    ],
)
def test_scopes_are_what_is_neither_a_transform_nor_control_flow(op_name, path, direction, primitive):
    scope = parse_op_name(op_name)
    assert (scope.path, scope.direction, scope.primitive) == (path, direction, primitive)
