"""Whole runs on meshes of eight devices; `test_meshes.py` runs this in a process that has eight.

Its arguments are a directory, and a pattern of text files to train on; `all` adds a run that resumes on its own mesh.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from run.test_policy_batches import EchoData

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.abi.errors import ConfigError, ShardingError
from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig
from stack_core.programs.flops import model_flops_per_step
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.kinds.text import language_model_shapes
from stack_train.run import train as run
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program, model_flops
from stack_train.run.run import build
from stack_train.variables.weights import read_params

CONFIG = {
    "model": {
        "name": "llama",
        "vocab_size": 288,
        "layers": 2,
        "embed": 32,
        "heads": 4,
        "mlp": 64,
        "dtype": "float32",
    },
    "data": {"seq_tokens": 16, "batch_size": 8, "vocab_size": 288, "validation_fraction": 0.2},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "run": {"steps": 4},
    "checkpoint": {"every_steps": 1, "keep": 10},
}
OTHER_MESH = ("mesh.data=2", "mesh.fsdp=1", "mesh.tensor=4", "mesh.rules.norm_seq=[context, tensor]")
REPLICAS = ("mesh.data=2", "mesh.fsdp=4", "mesh.dcn_data=2", "optimizer.outer={every_steps: 2, replicas: 2}")
RAMPED = (*REPLICAS, "data.batch_size=16", "run.ramp=[{rows: 8, steps: 2}]")
REFUSED = (
    (["mesh.fsdp=8", "run.ramp=[{rows: 4, steps: 2}]"], ShardingError, ["run.ramp[0].rows is 4", "a multiple of 8"]),
    (
        ["mesh.data=2", "mesh.fsdp=4", "optimizer.outer={every_steps: 2, replicas: 3}"],
        ShardingError,
        ["optimizer.outer.replicas is 3, and mesh.data is 2, which is not a multiple of it", "mesh.data=3"],
    ),
    (
        ["mesh.data=2", "mesh.fsdp=4", "data.batch_size=12", "optimizer.outer={every_steps: 2, replicas: 2}"],
        ShardingError,
        ["'batch', has size 12", "mesh.replica=2", "mesh.replica is optimizer.outer.replicas, and mesh.data the"],
    ),
    (
        ["mesh.data=2", "mesh.stage=2", "mesh.fsdp=2", "optimizer.outer={every_steps: 3, replicas: 2}"],
        ConfigError,
        ["optimizer.outer.replicas is 2, but mesh.stage is more than 1, which replicas"],
    ),
    (
        ["mesh.data=2", "mesh.fsdp=4", "optimizer.outer={every_steps: 3, replicas: 2}"],
        ConfigError,
        ["run.steps is 4, and the last 1 updates would be in no outer step", "such as 6"],
    ),
    (
        ["model.heads=3", "model.head_dim=16", "mesh.tensor=2", "mesh.fsdp=4"],
        ShardingError,
        ["queries (8, 16, 3, 16): axis 2, 'act_heads', has size 3", "(mesh.tensor=2)", "size 2 or 4", "model.heads=3"],
    ),
    (
        ["data.batch_size=6", "mesh.data=4", "mesh.tensor=2", "mesh.fsdp=1"],
        ShardingError,
        ["axis 0, 'batch', has size 6", "mesh.data=4", "size 4 or 8", "mesh.data=2", "data.batch_size=6"],
    ),
    (
        ["run.accumulation_steps=2", "mesh.fsdp=8"],
        ShardingError,
        ["a microbatch (2, 4, 16): axis 1, 'batch', has size 4", "run.accumulation_steps=2"],
    ),
    (
        ["model.vocab_size=289", "mesh.tensor=2", "mesh.fsdp=4"],
        ShardingError,
        ["embedding (289, 32): axis 0, 'vocab', has size 289", "\nlm_head (32, 289)", "model.vocab_size=289"],
    ),
    (
        ["mesh.context=2", "mesh.fsdp=4", "mesh.rules.seq=null"],
        ConfigError,
        ["mesh.context is 2, but its devices would divide no work: mesh.rules.seq does not name it"],
    ),
    (
        ["mesh.stage=2", "mesh.fsdp=4", "mesh.rules.layers=null"],
        ConfigError,
        ["mesh.stage is 2, but its devices would divide no work: mesh.rules.layers does not name it"],
    ),
    (
        ["mesh.stage=2", "mesh.fsdp=4", "run.accumulation_steps=2", "run.pipeline.microbatches=3"],
        ConfigError,
        ["take the place of run.accumulation_steps", "run.pipeline.microbatches=3 does not divide the batch"],
    ),
    (
        [
            "model.name=mixtral",
            "model.experts=4",
            "model.active_experts=2",
            "mesh.stage=2",
            "mesh.context=2",
            "mesh.fsdp=2",
        ],
        ConfigError,
        ["the model has mixtures of experts or multi-token prediction, which take mesh.context and no other axis"],
    ),
    (
        ["mesh.context=2", "mesh.fsdp=4", "data.seq_tokens=14"],
        ShardingError,
        ["The sequence has 14 tokens; 2 devices", "multiple of 4", "12 or 16", "data.seq_tokens=14"],
    ),
    (
        ["mesh.rules.embed=tensor"],
        ShardingError,
        ["blocks/0/0/attention/key/kernel", "'embed' -> 'tensor' and 'kv_heads' -> 'tensor'", "mesh.rules.embed or"],
    ),
    (["mesh.rules.norm_sq=tensor"], ConfigError, ["mesh.rules.norm_sq", "Did you mean 'norm_seq'", "act_heads"]),
    (["mesh.rules.norm_seq=tenser"], ConfigError, ["mesh.rules.norm_seq", "'tenser'", "Did you mean 'tensor'"]),
)


def config_of(output, texts, *overrides):
    base = apply_overrides(CONFIG, [f"data.source=text:{texts}", f"output={output}", *overrides])
    return parse(RunConfig, base)


def stop_after(step):
    """Makes the next run stop once `step` is done."""
    original = run.TrainingLoop._finish

    def finish(self, dispatched):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == step:
            run.TrainingLoop._finish = original
            os.kill(os.getpid(), signal.SIGTERM)

    run.TrainingLoop._finish = finish


def state_of(config, step):
    """The state saved at a step, restored onto the config's mesh, and its leaves on the host."""
    program = build_program(config)
    with CheckpointStore(Path(config.output) / "checkpoints") as store:
        state = store.restore(program.abstract_state, step).state
    return state, {
        name: np.asarray(jax.random.key_data(leaf) if name == "key" else leaf)
        for name, leaf in named_leaves(state).items()
    }


def losses(config):
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return {(record["kind"], record["step"]): record["loss"] for record in map(json.loads, lines)}


def assert_bitwise(left, right):
    assert left.keys() == right.keys()
    for name, leaf in left.items():
        np.testing.assert_array_equal(leaf, right[name], err_msg=name)


def a_run_resumes_on_another_mesh(root, texts):
    whole, moved = (config_of(root / name, texts, "mesh.fsdp=8") for name in ("whole", "moved"))
    moved_on = config_of(root / "moved", texts, *OTHER_MESH)
    summary = run.train(whole)
    assert summary.step == 4 and math.isfinite(summary.validation_loss)
    shutil.copytree(whole.output, moved.output)
    for step in (3, 4):
        shutil.rmtree(root / "moved" / "checkpoints" / f"{step:08d}")
    saved, on_other_mesh = state_of(moved, 2), state_of(moved_on, 2)
    assert_bitwise(saved[1], on_other_mesh[1])
    kernel = on_other_mesh[0].params["blocks"][0][0]["attention"]["query"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 32, 8)
    assert dict(kernel.sharding.mesh.shape)["tensor"] == 4

    assert run.train(moved_on, resume=True).step == 4
    expected, found = losses(whole), losses(moved_on)
    assert expected.keys() == found.keys() and ("evaluation", 4) in found
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def a_run_resumes_on_its_mesh_bit_by_bit(root, texts):
    whole, cut = (config_of(root / name, texts, "mesh.fsdp=8") for name in ("whole", "cut"))
    stop_after(2)
    assert run.train(cut).stopped_by == "SIGTERM"
    run.train(cut, resume=True)
    assert_bitwise(state_of(whole, 4)[1], state_of(cut, 4)[1])
    assert losses(cut) == losses(whole)


def replicas_resume_within_an_interval_bit_by_bit(root, texts):
    """From step 3 of intervals of two steps: the replicas differ, and the export has the parameters of step 2."""
    whole, cut = (config_of(root / name, texts, *RAMPED) for name in ("apart", "cut apart"))
    summary = run.train(whole)
    assert math.isfinite(summary.validation_loss)
    shutil.copytree(whole.output, cut.output)
    shutil.rmtree(Path(cut.output) / "checkpoints" / "00000004")
    (_, second), (_, third) = state_of(whole, 2), state_of(whole, 3)
    assert_bitwise(*({name: leaf for name, leaf in each.items() if "params/" in name} for each in (second, third)))
    apart = [name for name in third if "replicas/" in name]
    assert apart and all(np.array_equal(*second[name]) for name in apart)
    assert not any(np.array_equal(*third[name]) for name in apart)
    exported, step = read_params(Path(cut.output), cut.model)
    assert step == 3
    for name, leaf in named_leaves(exported).items():
        np.testing.assert_array_equal(leaf, third[f"params/{name}"], err_msg=name)
    run.train(cut, resume=True)
    assert_bitwise(state_of(whole, 4)[1], state_of(cut, 4)[1])
    assert losses(cut) == losses(whole)


def replicas_resume_with_more_devices_each(root, texts):
    """From step 1, within an interval and within the smaller batches, as if hosts had joined or left."""
    whole = config_of(root / "apart", texts, *RAMPED)
    moved = config_of(root / "moved apart", texts, *RAMPED, "mesh.data=4", "mesh.fsdp=2")
    shutil.copytree(whole.output, moved.output)
    for step in (2, 3, 4):
        shutil.rmtree(Path(moved.output) / "checkpoints" / f"{step:08d}")
    run.train(moved, resume=True)
    expected, found = losses(whole), losses(moved)
    assert expected.keys() == found.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def replicas_refuse_batches_of_the_policy(root, texts):
    class Rows(EchoData):
        def spec(self, model):
            return language_model_shapes(8, 8)

    config = dataclasses.replace(config_of(root / "refused", texts, *REPLICAS), data=Rows())
    with pytest.raises(ConfigError, match=r"replicas is 2, and data\.name 'echoes' makes its batches with the policy"):
        build(config)
    assert not (root / "refused").exists()


def the_resolved_config_has_every_rule(root, texts):
    rules = load_yaml(root / "whole" / "config.yaml")["mesh"]["rules"]
    assert rules.keys() == dict(DEFAULT_RULES.table).keys()
    assert rules["batch"] == ["data", "fsdp", "expert"] and rules["norm"] is None
    assert load_yaml(root / "moved" / "config.yaml")["mesh"]["rules"]["norm_seq"] == ["context", "tensor"]


def a_run_starts_from_the_weights_of_another_mesh(root, texts):
    config = config_of(root / "started", texts, *OTHER_MESH, f"run.init_from={root / 'whole'}", "run.steps=1")
    run.train(config)
    assert losses(config)["train", 1] < 0.9 * losses(config_of(root / "whole", texts))["train", 1]


def what_the_mesh_does_not_divide_is_refused_before_anything_is_written(root, texts):
    os.environ["XDG_CACHE_HOME"] = str(root / "no cache")
    for overrides, expected, parts in REFUSED:
        with pytest.raises(expected) as caught:
            run.train(config_of(root / "refused", texts, *overrides))
        missing = [part for part in parts if part not in str(caught.value)]
        assert not missing, f"{missing} missing from:\n{caught.value}"
        assert not (root / "refused").exists() and not (root / "no cache").exists()


def a_mixture_needs_the_flops_that_one_device_does(root, texts):
    """Whatever room the buffers of its experts have."""
    mixture = ("model.name=mixtral", "model.experts=8", "model.active_experts=2", "mesh.fsdp=2", "mesh.expert=4")
    config = config_of(root / "mixture", texts, *mixture)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    on_mesh, on_one = build_program(config), build_program(alone, jax.devices()[:1])
    needed = model_flops(config, on_mesh)
    assert needed == model_flops(alone, on_one)
    done = model_flops_per_step(
        on_mesh.on_mesh(on_mesh.step.evaluate), on_mesh.abstract_variables, config.data.spec(config.model), {}
    )
    # The loops of stack-kernels over groups, whose length only a run knows, are counted in the reference.
    assert not done.uncounted and done.total > needed.total > 0


if __name__ == "__main__":
    root, texts = Path(sys.argv[1]), sys.argv[2]
    a_run_resumes_on_another_mesh(root, texts)
    if "all" in sys.argv:
        a_run_resumes_on_its_mesh_bit_by_bit(root, texts)
    replicas_resume_within_an_interval_bit_by_bit(root, texts)
    replicas_resume_with_more_devices_each(root, texts)
    replicas_refuse_batches_of_the_policy(root, texts)
    the_resolved_config_has_every_rule(root, texts)
    a_run_starts_from_the_weights_of_another_mesh(root, texts)
    what_the_mesh_does_not_divide_is_refused_before_anything_is_written(root, texts)
    a_mixture_needs_the_flops_that_one_device_does(root, texts)
