"""Gradients of rollouts over meshes and microbatches, and rollouts drawn from a mesh; run with eight host devices."""

import sys
from pathlib import Path

import jax
import numpy as np
from test_rollouts import cell, records

from stack_rl.contracts import Trajectory
from stack_rl.experience import batch_of, batch_shapes, credited, update_batch
from stack_rl.math.weights import WEIGHTS
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.packing import PackedRows, row_counts
from stack_rl.rollout_batches import RolloutBatches
from stack_train import build, start
from stack_train.run.placing import shard_batch
from stack_train.run.program import build_program

ROWS, SEQ = 16, 24
MESHES = ("mesh.data=8,mesh.fsdp=1", "mesh.fsdp=8", "mesh.tensor=2,mesh.fsdp=4", "mesh.fsdp=2,run.accumulation_steps=4")
PACKED = {"mesh.fsdp=1": 6, MESHES[3]: 8}
"""Rows of the packed batch by mesh, a multiple of its devices and microbatches."""


def main() -> None:
    output = Path(sys.argv[1])
    check_gradients(output)
    check_rollouts(output)


def check_gradients(output: Path) -> None:
    """The largest difference from one device's gradient, of each aggregation, over the largest entry of the leaf."""
    expected = dict(zip(WEIGHTS, gradients(output, "mesh.fsdp=1"), strict=True))
    for mesh, rows in [*dict.fromkeys(MESHES).items(), *PACKED.items()]:
        for name, found in zip(WEIGHTS, gradients(output, mesh, rows), strict=True):
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected[name]), strict=True)
            difference = max(float(np.abs(ours - right).max() / np.abs(right).max()) for ours, right in pairs)
            sys.stdout.write(f"{mesh} {name} in {rows or ROWS} rows: {difference:.1e}\n")
            assert difference < 1e-6, (mesh, name, difference)


def gradients(output: Path, mesh: str, rows: int | None = None) -> list:
    """Of one batch by each aggregation, on a mesh; packed into `rows` if they are given."""
    sizes = (
        f"data.seq_tokens={SEQ}",
        f"model.max_positions={SEQ}",
        "data.groups=4",
        "data.group_size=4",
        "objective.kl=0.1",
    )
    config = cell(output / "never", *sizes, *mesh.split(","))
    count = int(np.prod(list(config.mesh.sizes.values())))
    program = build_program(config, jax.devices()[:count])
    state = program.init(key=jax.random.key(0))
    differentiate = jax.jit(lambda state, batch: program.on_mesh(program.step.gradients)(state, batch)[0])
    batches = [batch(name) for name in WEIGHTS]
    if rows is not None:
        plan = PackedRows.plan(batches[0]["segment_ids"], row_counts(ROWS, program.batch_parts))
        batches = [plan.pack(each) for each in batches]
        assert {len(each["tokens"]) for each in batches} == {rows}, plan.shape
    return [jax.device_get(differentiate(state, shard_batch(program, each))) for each in batches]


def batch(aggregation: str) -> dict[str, np.ndarray]:
    """Episodes of unlike lengths, and rows of padding."""
    rng = np.random.default_rng(0)
    found = []
    for row in range(ROWS - 3):
        length, prompt = int(rng.integers(3, SEQ // 2 + 1)), int(rng.integers(1, 3))
        sampled = np.arange(length) >= prompt
        trajectory = Trajectory(
            group=row // 4,
            task=row // 4,
            tokens=rng.integers(12, size=length).astype(np.int32),
            sampled=sampled,
            logprobs=np.where(sampled, rng.normal(-2.5, 0.3, length), 0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            rewards=np.where(np.arange(length) == length - 1, rng.normal(), 0).astype(np.float32),
        )
        found.append(trajectory)
    algorithm = GRPOConfig(loss_aggregation=aggregation)
    whole = batch_of(found, shapes=batch_shapes(ROWS, SEQ, algorithm), version=0)
    return update_batch(credited(whole, found, algorithm, {}), np.arange(ROWS), found, algorithm)


def check_rollouts(output: Path) -> None:
    """A run on eight devices is that of one, up to rounding, whether its engine draws on them or on four."""
    steps = ("run.steps=3", "run.evaluate_every_steps=0", "mesh.fsdp=8")
    one = records(Path(sys.argv[2]), "train")
    for mesh in ("", "data.engine_mesh.fsdp=2,data.engine_mesh.tensor=2"):
        run = build(cell(output / f"eight{len(mesh)}", *steps, *filter(None, mesh.split(","))))
        seen = places_of_weights(run.data)
        start(run)
        assert seen == [{4 if mesh else 8}] * 4, seen
        eight = records(run.directory.path, "train")
        for name in ("reward", "action_tokens", "loss", "logprob"):
            ours, theirs = ([each[name] for each in found[:3]] for found in (eight, one))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
        assert max(each["largest_mismatch"] for each in eight) < 1e-4
    sys.stdout.write("rollouts ok\n")


def places_of_weights(data: RolloutBatches) -> list[set[int]]:
    """On how many devices the engine's parameters lie, whenever it has got new ones."""
    seen, take = [], data.update_weights

    def taken(*given):
        take(*given)
        seen.append({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(data._play.engine._params)})

    data.update_weights = taken
    return seen


if __name__ == "__main__":
    main()
