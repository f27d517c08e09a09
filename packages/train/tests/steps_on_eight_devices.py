"""Training steps on meshes of up to eight devices; `test_meshes.py` runs this in a process that has eight.

The argument `all` adds the other meshes and both placements of the norms to a choice that has each axis and placement.
"""

import dataclasses
import math
import sys

import jax
import numpy as np
from guided import GuidedConfig

from stack_core.abi.mesh import MeshConfig, check_shardings
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.definitions import linear_cross_entropy
from stack_core.ops.references import attention_tiles
from stack_core.programs.hlo import Execution, parse_hlo
from stack_core.programs.hlo_costs import executed_flops
from stack_train.models.llama import LlamaConfig
from stack_train.nn.stack import NamedRemat
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, ScheduleConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

MODEL = LlamaConfig(
    vocab_size=48,
    layers=6,
    embed=32,
    heads=8,
    kv_heads=4,
    mlp=64,
    max_positions=16,
    dtype="float32",
    initializer_std=0.2,
)
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 4},
    {"data": 2, "fsdp": 4},
    {"data": 2, "tensor": 4},
    {"fsdp": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
)
FEW_MESHES = ({"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
KEPT = NamedRemat(save=("query", "key", "value", "attention", "attention_output"), offload=("hidden",))
MOST_WORK = 1.1  # of a device's even share of the FLOPs
SEQUENCE_SHARDED = {"norm_seq": ("context", "tensor")}
ROWS, SEQ, STEPS, CHUNKS = 16, 16, 4, 4
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def make_program(sizes, rules=None, **changes):
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    fields = {
        "model": MODEL,
        "objective": CausalLMConfig(),
        "optimizer": AdamWConfig(learning_rate=1e-2, schedule=ScheduleConfig(warmup_steps=2)),
        "steps": STEPS,
    }
    return Program(make_step(**{**fields, **changes}), mesh, rules or {})


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, MODEL.vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
        targets = tokens[:, 1:].copy()
        targets[0, : SEQ // 2] = -100  # rows weigh differently, so that a mean of means would be wrong
        segments = np.repeat(np.array([[1] * 6 + [2] * (SEQ - 6)], np.int32), ROWS, axis=0)
        positions = np.tile(np.concatenate([np.arange(6), np.arange(SEQ - 6)]).astype(np.int32), (ROWS, 1))
        yield {"tokens": tokens[:, :-1], "targets": targets, "positions": positions, "segment_ids": segments}


def trained(program, state):
    """Losses and gradient norms of all steps, the last state, the compiled step, and the first step's gradients."""
    results, compiled, gradients = [], None, None
    for batch in batches():
        placed = _on(program, batch)
        compiled = compiled or program.trace(placed).lower().compile()
        state, metrics = compiled(state, placed)
        gradients = gradients or first_moments(state)
        results.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(results), state, compiled, gradients


def first_moments(state):
    """AdamW's moving averages by parameter: after one step, the gradients times one factor."""
    leaves = jax.tree.leaves_with_path(jax.device_get(state.opt_state))
    return [leaf for path, leaf in leaves if "mu" in _names(path)]


def expected_sharding(program, path, leaf):
    """The sharding of a leaf of the state by the name that its path ends with, read from the rules anew."""
    if leaf.ndim == 0:
        return program.sharding_rules.sharding(program.mesh, (), ())
    names = _names(path)
    axes = program.step.model.variables.logical_axes
    for name in names[names.index("params" if "params" in names else "mu" if "mu" in names else "nu") + 1 :]:
        axes = axes[name]
    return program.sharding_rules.sharding(program.mesh, axes, leaf.shape)


def check_state(program, state):
    """Every parameter and every moment lies by its rule, and parameters do not lie whole where a rule splits them."""
    check_shardings(state, jax.tree.map_with_path(lambda *leaf: expected_sharding(program, *leaf), state))
    parts = math.prod(program.mesh.shape[axis] for axis in ("fsdp", "tensor"))
    kernel = state.params["blocks"][0][0]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // parts


def elements(execution: Execution):
    return [math.prod(shape.dims) for shape in execution.instruction.shapes]


def check_collectives(program, compiled, sizes):
    """Parameters are gathered layer by layer, the head once; its gradient is summed once; updates stay in place."""
    tensor = sizes.get("tensor", 1)
    trained = program.step.model.variables.trained
    stacked = {leaf.size // tensor for leaf in jax.tree.leaves(trained["blocks"]) if leaf.ndim == 3}
    head = trained["lm_head"].size // tensor
    found = [
        execution
        for execution in parse_hlo(compiled.as_text()).executions()
        if execution.instruction.opcode.removesuffix("-start") in COLLECTIVES
    ]
    gathers = [execution for execution in found if execution.instruction.opcode.startswith("all-gather")]
    for execution in found:
        assert not (execution.loops and head in elements(execution)), execution.instruction
    for execution in gathers:
        assert not stacked & set(elements(execution)), execution.instruction
    whole = [size for execution in gathers if not execution.loops for size in elements(execution)]
    if sizes.get("fsdp", 1) > 1:
        layer = {size // MODEL.layers for size in stacked}
        in_loops = {size for execution in gathers if execution.loops for size in elements(execution)}
        assert layer <= in_loops, (layer, in_loops)
        assert sorted(set(whole) - {ROWS * SEQ // sizes.get("data", 1)}) == [head], whole  # and the tokens
    else:
        assert not whole, whole


def flops(compiled):
    return executed_flops(parse_hlo(compiled.as_text())).total


def placements(sizes, *, every):
    """Returns the rules to train by on a mesh: with few meshes, three axes have the norms split over the sequence."""
    if not every:
        return (SEQUENCE_SHARDED if len(sizes) == 3 else {},)
    return ({}, SEQUENCE_SHARDED) if "tensor" in sizes else ({},)


def same_losses_on_meshes(*, every):
    """Returns the state that all start from, that of one device."""
    single = make_program({"data": 1})
    start = jax.device_get(jax.tree.map(_plain, single.init(key=jax.random.key(0))))
    expected, _, whole, of_one = trained(single, _placed(single, start))
    assert len(of_one) == len(jax.tree.leaves(start.params))
    assert expected[-1, 0] < expected[0, 0]
    for sizes in MESHES if every else FEW_MESHES:
        for rules in placements(sizes, every=every):
            changes = (
                {"model": dataclasses.replace(MODEL, remat=KEPT), "accumulation_steps": 2} if len(sizes) == 3 else {}
            )
            program = make_program(sizes, rules=rules, **changes)
            found, state, compiled, of_mesh = trained(program, _placed(program, start))
            where = f"{sizes}, norm_seq -> {dict(program.sharding_rules.table)['norm_seq']}"
            np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-5, err_msg=f"losses, {where}")
            np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-4, err_msg=f"gradient norms, {where}")
            check_state(program, state)
            assert flops(compiled) <= MOST_WORK * flops(whole) / math.prod(sizes.values()), where
            if not rules and program.step.accumulation_steps == 1:
                check_collectives(program, compiled, sizes)
            for one, several in zip(of_one, of_mesh, strict=True):
                np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=where)
    return start


def a_head_split_over_the_batch_is_never_whole(start):
    """Devices of `fsdp` exchange rows of the loss, and neither the head nor its gradient; see `HeadGroups`."""
    expected, _, whole, of_one = trained(single := make_program({"data": 1}), _placed(single, start))
    for sizes, parts in (
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("tensor", "fsdp")),
        ({"fsdp": 2, "expert": 2}, ("fsdp", "expert")),
        ({"fsdp": 2, "context": 2}, ("fsdp",)),
    ):
        rules = {"act_vocab": parts, "embed": [axis for axis in parts if axis != "tensor"], "lookup_batch": "data"}
        program = make_program(sizes, rules=rules)
        found, state, compiled, of_mesh = trained(program, _placed(program, start))
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=f"{sizes}")
        for one, several in zip(of_one, of_mesh, strict=True):
            np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=f"{sizes}")
        assert flops(compiled) <= MOST_WORK * flops(whole) / math.prod(sizes.values()), sizes
        part = state.params["lm_head"].size // math.prod(sizes[axis] for axis in parts)
        for execution in parse_hlo(compiled.as_text()).executions():
            for shape in execution.instruction.shapes:
                is_head = shape.dims and set(shape.dims) - {1} == {MODEL.embed, MODEL.vocab_size}
                assert not is_head and (MODEL.vocab_size not in shape.dims or math.prod(shape.dims) <= part), (
                    sizes,
                    execution.instruction,
                )


def initial_values_do_not_depend_on_the_mesh(start):
    program = make_program({"fsdp": 2, "tensor": 2})
    state = program.init(key=jax.random.key(0))
    check_state(program, state)
    for one, other in zip(*map(jax.tree.leaves, (start.params, state.params)), strict=True):
        np.testing.assert_array_equal(one, other)


def further_models_lie_by_their_rules_and_learn_as_on_one_device():
    kernels = []
    for sizes in ({"data": 1}, {"fsdp": 2, "tensor": 2}):
        program = make_program(sizes, objective=GuidedConfig())
        _, state, *_ = trained(program, program.init(key=jax.random.key(0)))
        guide = state.auxiliary["guide"]
        kernels.append(guide.params["kernel"])
        for leaf in (kernels[-1], *(each for each in jax.tree.leaves(guide.opt_state) if each.ndim == 2)):
            assert leaf.addressable_shards[0].data.size == leaf.size // math.prod(sizes.values())
    np.testing.assert_allclose(kernels[1], kernels[0], rtol=1e-4, atol=1e-6)


def _names(path):
    return [getattr(key, "key", getattr(key, "name", "")) for key in path]


def _plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _on(program, batch):
    return jax.device_put(batch, program.batch_shardings(batch))


def _placed(program, start):
    """A host's state on a program's mesh."""
    with_key = dataclasses.replace(start, key=jax.random.wrap_key_data(start.key))
    return jax.device_put(with_key, program.state_shardings)


if __name__ == "__main__":
    # Several chunks of the loss and tiles of attention, small as the model is.
    attention_tiles._TILE_BYTES = 1
    attention_tiles._FEWEST_ROWS = attention_tiles._FEWEST_KEYS = SEQ // 2
    linear_cross_entropy._FEWEST_ROWS = linear_cross_entropy._CHUNK_BYTES = 1
    linear_cross_entropy._MOST_CHUNKS = CHUNKS
    start = same_losses_on_meshes(every="all" in sys.argv)
    initial_values_do_not_depend_on_the_mesh(start)
    a_head_split_over_the_batch_is_never_whole(start)
    further_models_lie_by_their_rules_and_learn_as_on_one_device()
