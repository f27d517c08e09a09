"""Replicas that train apart; `test_on_eight_devices.py` runs this in a process that has eight devices.

The argument `all` adds further meshes and optimizers.
"""

import dataclasses
import math
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig, check_shardings
from stack_core.abi.metrics import Metric
from stack_core.chips.device_mesh import make_mesh
from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import collectives
from stack_train.models.llama import LlamaConfig
from stack_train.models.mixtral import MixtralConfig
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig, GroupConfig, MuonConfig, OuterConfig, ScheduleConfig, SgdConfig
from stack_train.run.compilation import outer_instructions
from stack_train.step.program import Program
from stack_train.step.step import make_step

MODEL = LlamaConfig(
    vocab_size=48,
    layers=2,
    embed=32,
    heads=4,
    kv_heads=2,
    mlp=64,
    max_positions=16,
    dtype="float32",
    initializer_std=0.2,
)
ROWS, SEQ, INTERVAL = 16, 16, 3
OUTER = OuterConfig(every_steps=INTERVAL, replicas=2, learning_rate=0.7, momentum=0.9)
SCHEDULE = ScheduleConfig(warmup_steps=2)
MESH = {"data": 2, "fsdp": 4, "dcn_data": 2}
MORE_MESHES = (
    {"data": 4, "fsdp": 2, "dcn_data": 2},
    {"data": 2, "fsdp": 2, "tensor": 2, "dcn_data": 2},
    {"data": 8, "fsdp": 1, "dcn_data": 2},
)
SHARED = {name: getattr(MODEL, name) for name in ("vocab_size", "embed", "heads", "max_positions", "dtype")}
OTHERS = (
    ({"data": 2, "fsdp": 2, "expert": 2}, MixtralConfig(**SHARED, layers=2, mlp=32, experts=4, active_experts=2)),
    ({"data": 2, "fsdp": 2, "context": 2}, MODEL),
)


def make_program(sizes, optimizer, model=MODEL, **changes):
    count = math.prod(size for axis, size in sizes.items() if not axis.startswith("dcn_"))
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[:count])
    return Program(make_step(model, CausalLMConfig(), optimizer, steps=2 * INTERVAL, **changes), mesh)


def batches(steps=2 * INTERVAL):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = rng.integers(0, MODEL.vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
        targets = tokens[:, 1:].copy()
        targets[0, : SEQ // 2] = -100  # the replicas have different numbers of targets
        positions = np.tile(np.arange(SEQ, dtype=np.int32), (ROWS, 1))
        yield {
            "tokens": tokens[:, :-1],
            "targets": targets,
            "positions": positions,
            "segment_ids": np.ones((ROWS, SEQ), np.int32),
        }


def trained(program, state, given):
    """Returns the state after each step, on the host, and the metrics."""
    step, states, found = None, [], []
    for batch in given:
        placed = jax.device_put(batch, program.batch_shardings(batch))
        step = step or program.compile(placed)
        state, metrics = step(state, placed)
        check_shardings(state, program.state_shardings)
        states.append(jax.device_get(dataclasses.replace(state, key=jax.random.key_data(state.key))))
        found.append({name: float(metric) for name, metric in metrics.items()})
    return states, found


def halves(batch):
    return [{name: x[part] for name, x in batch.items()} for part in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))]


def written_out(optimizer, start, given, **changes):
    """DiLoCo with two runs of their own and an outer step in NumPy."""
    program = make_program({"fsdp": 1}, optimizer, **changes)
    states = [dataclasses.replace(program.init(key=jax.random.key(0)), params=_copied(start)) for _ in range(2)]
    anchor = jax.tree.map(np.float64, start)
    momentum = jax.tree.map(np.zeros_like, anchor)
    step = program.compile(halves(next(batches()))[0])
    outer, losses = [], []
    for number, batch in enumerate(given, 1):
        parts, found = halves(batch), []
        for index, part in enumerate(parts):
            states[index], metrics = step(states[index], part)
            found.append(float(metrics["loss"]))
        targets = [(part["targets"] != -100).sum() for part in parts]
        losses.append(np.average(found, weights=targets))
        if number % INTERVAL == 0:
            reached = [jax.device_get(state.params) for state in states]
            gradient = jax.tree.map(lambda x, one, two: x - (np.float64(one) + two) / 2, anchor, *reached)
            momentum = jax.tree.map(lambda m, d: OUTER.momentum * m + d, momentum, gradient)
            anchor = jax.tree.map(
                lambda x, m, d: x - OUTER.learning_rate * (OUTER.momentum * m + d), anchor, momentum, gradient
            )
            states = [dataclasses.replace(state, params=_copied(anchor)) for state in states]
        outer.append(anchor)
    return outer, losses


def replicas_train_as_two_runs_with_an_outer_step(sizes, optimizer, **changes):
    apart = dataclasses.replace(optimizer, outer=OUTER)
    program = make_program(sizes, apart, **changes)
    state = program.init(key=jax.random.key(0))
    start = jax.device_get(state.params)
    states, metrics = trained(program, state, batches())
    expected, losses = written_out(optimizer, start, batches(), **changes)
    np.testing.assert_allclose([each["loss"] for each in metrics], losses, rtol=1e-5, err_msg=str(sizes))
    for number, (found, outer) in enumerate(zip(states, expected, strict=True), 1):
        _assert_close(found.params, outer, f"{sizes}, outer parameters after step {number}")
        first, second = (jax.tree.map(lambda x, i=i: x[i], found.opt_state.replicas) for i in range(2))
        is_alike = all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
        assert is_alike == (number % INTERVAL == 0), number


def outer_steps_of_sgd_after_every_update_are_data_parallelism():
    plain = SgdConfig(learning_rate=0.5, momentum=0.0, clip_norm=None)
    full = OuterConfig(every_steps=1, replicas=2, learning_rate=1.0, momentum=0.0)
    given = [{**batch, "targets": np.abs(batch["targets"]) % MODEL.vocab_size} for batch in batches()]
    ordinary = make_program(MESH, plain)
    expected, losses = trained(ordinary, ordinary.init(key=jax.random.key(0)), given)
    apart = make_program(MESH, dataclasses.replace(plain, outer=full))
    found, metrics = trained(apart, apart.init(key=jax.random.key(0)), given)
    for one, other in zip(found, expected, strict=True):
        _assert_close(one.params, other.params, "SGD")
    np.testing.assert_allclose([each["loss"] for each in metrics], [each["loss"] for each in losses], rtol=1e-5)


def only_scalars_and_outer_steps_cross_slices(sizes):
    def crossing(outer):
        program = make_program(sizes, AdamWConfig(outer=outer))
        batch = next(batches())
        module = parse_hlo(program.trace(batch).lower().compile().as_text())
        found = collectives(module, 8, [place // 4 for place in range(8)])
        every = [(each, any(_crosses(group) for group in each.groups)) for each in found]
        return [each for each, crosses in every if crosses], outer_instructions(module), program

    ordinary, none, program = crossing(None)
    parameters = program.step.model.parameter_count
    assert not none
    assert sum(each.times * each.array_bytes for each in ordinary) >= parameters
    apart, outer, _ = crossing(OUTER)
    within = [each for each in apart if each.runner not in outer]
    elements = [math.prod(array.dims) for each in within for array in each.arrays]
    assert elements and max(elements) <= 2 and all(not each.loops for each in within), within
    outer_bytes = sum(each.times * each.array_bytes for each in apart if each.runner in outer)
    shards = math.prod(sizes.get(axis, 1) for axis in ("fsdp", "tensor"))
    assert parameters * 4 / shards <= outer_bytes < parameters * 4 / shards * 1.5, (outer_bytes, parameters)


def _crosses(group):
    return len({place // 4 for place in group}) > 1


def each_replica_has_random_numbers_of_its_own():
    def sampled(model, batch, *, key):
        number = jax.random.uniform(key)
        return number, {"largest": Metric.max(number), "smallest": Metric.min(number)}

    step = make_step(MODEL, sampled, SgdConfig(outer=OUTER), steps=INTERVAL)
    program = Program(step, make_mesh(MeshConfig(**MESH)))
    _, (found, *_) = trained(program, program.init(key=jax.random.key(0)), batches(1))
    assert found["smallest"] < found["loss"] < found["largest"]


def frozen_parameters_and_rounded_moments_are_those_of_each_replica():
    settings = AdamWConfig(groups={"embedding": GroupConfig(frozen=True)}, moments="8bit", outer=OUTER)
    program = make_program(MESH, settings, accumulation_steps=2)
    start = program.init(key=jax.random.key(0))
    before = jax.device_get(start.frozen)
    states, metrics = trained(program, start, batches())
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert {"embedding"} == before.keys() == states[-1].frozen.keys()
    np.testing.assert_array_equal(states[-1].frozen["embedding"], before["embedding"])
    codes = [leaf for leaf in jax.tree.leaves(states[0].opt_state.inner) if leaf.dtype.itemsize == 1]
    assert codes and all(leaf.shape[0] == 2 and not np.array_equal(*leaf) for leaf in codes)


def _assert_close(tree, expected, message):
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=message)


def _copied(tree):
    return jax.tree.map(lambda x: jax.numpy.array(x, "float32"), tree)


if __name__ == "__main__":
    every = "all" in sys.argv
    adamw = AdamWConfig(learning_rate=1e-2, schedule=SCHEDULE)
    replicas_train_as_two_runs_with_an_outer_step(MESH, adamw)
    outer_steps_of_sgd_after_every_update_are_data_parallelism()
    only_scalars_and_outer_steps_cross_slices(MESH)
    each_replica_has_random_numbers_of_its_own()
    if every:
        frozen_parameters_and_rounded_moments_are_those_of_each_replica()
        replicas_train_as_two_runs_with_an_outer_step(MESH, MuonConfig(learning_rate=1e-2, schedule=SCHEDULE))
        for sizes, model in OTHERS:
            replicas_train_as_two_runs_with_an_outer_step(sizes, adamw, model=model)
        for sizes in MORE_MESHES:
            replicas_train_as_two_runs_with_an_outer_step(sizes, adamw)
            only_scalars_and_outer_steps_cross_slices(sizes)
