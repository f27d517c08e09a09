"""Trains a tiny Llama by each optimizer; `test_every_optimizer.py` runs this in a process, kills it and runs it again.

    optimizers_on_devices.py DIRECTORY STEPS KILL_AFTER_STEPS DEVICES NAME...

Each optimizer saves one checkpoint, after half of its steps. With KILL_AFTER_STEPS the process dies once all have done
as many steps. A process that finds checkpoints resumes from them. Prints a JSON object: by name, the last loss, a
digest of every leaf, the digests after resuming once more from the checkpoint, and the entropy of single tokens.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig, check_shardings
from stack_core.chips.device_mesh import make_mesh
from stack_core.runtime.digest import array_digests
from stack_train.checkpoint import CheckpointConfig, CheckpointStore, named_leaves
from stack_train.models.llama import LlamaConfig
from stack_train.objectives import CausalLMConfig
from stack_train.optim import (
    AdafactorConfig,
    AdamWConfig,
    GroupConfig,
    LionConfig,
    MuonConfig,
    OuterConfig,
    ScheduleConfig,
    ScheduleFreeConfig,
    SgdConfig,
    SpikeConfig,
)
from stack_train.step.program import Program
from stack_train.step.step import make_step

VOCAB, ROWS, SEQ = 32, 8, 32
MODEL = LlamaConfig(
    vocab_size=VOCAB, layers=2, embed=32, heads=4, kv_heads=2, mlp=64, max_positions=SEQ, dtype="float32"
)
WARM = ScheduleConfig(warmup_steps=10)
OPTIMIZERS = {
    "adafactor": AdafactorConfig(schedule=WARM, learning_rate=0.05, smallest_factored=8),
    "adamw": AdamWConfig(schedule=WARM, learning_rate=1e-2),
    "lion": LionConfig(schedule=WARM, learning_rate=3e-3, moments="bfloat16"),
    "muon": MuonConfig(
        schedule=ScheduleConfig(warmup_steps=10, decay="linear", decay_fraction=0.3),
        learning_rate=1e-2,
        groups={".*norm": GroupConfig(rate_factor=0.5, weight_decay=0.0)},
        skip_spikes=SpikeConfig(window_steps=16),
        ema_decay=0.9,
        moments="8bit",
        offload=True,
    ),
    "schedule_free": ScheduleFreeConfig(schedule=ScheduleConfig(warmup_steps=10, decay="constant"), learning_rate=2e-2),
    "sgd": SgdConfig(
        schedule=WARM,
        learning_rate=0.3,
        weight_decay=0.0,
        outer=OuterConfig(every_steps=2, learning_rate=1.0, momentum=0.1),
    ),
}


def batch_of(step):
    """Tokens that mostly follow from the one before: their conditional entropy is far below the unigram entropy."""
    rng = np.random.default_rng(step)
    successor = np.random.default_rng(0).permutation(VOCAB)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1), dtype=np.int32)
    for place in range(1, SEQ + 1):
        follows = rng.random(ROWS) < 0.9
        tokens[follows, place] = successor[tokens[follows, place - 1]]
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(SEQ, dtype=np.int32), (ROWS, 1)),
        "segment_ids": np.ones((ROWS, SEQ), np.int32),
    }


def unigram_entropy(steps):
    """In nats, of all targets."""
    counts = np.bincount(np.concatenate([batch_of(step)["targets"].ravel() for step in range(steps)]))
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def make_program(name, devices, steps):
    mesh = MeshConfig(fsdp=devices // 2, tensor=2) if devices > 1 else MeshConfig()
    step = make_step(MODEL, CausalLMConfig(), OPTIMIZERS[name], steps=steps)
    return Program(step, make_mesh(mesh, jax.devices()[:devices]))


def train(program, step, directory, saved_step, stop):
    """Resumes from the checkpoint, if there is one, and trains up to `stop` steps; returns the state and metrics."""
    with CheckpointStore(directory, CheckpointConfig()) as store:
        resumed = store.latest() is not None
        state = store.restore(program.abstract_state).state if resumed else program.init(key=jax.random.key(0))
        metrics = {}
        for number in range(saved_step if resumed else 0, stop):
            state, metrics = step(state, place_batch(program, number))
            if number + 1 == saved_step:
                store.save(saved_step, state, {}, "")
    check_shardings(state, program.state_shardings)
    return state, metrics


def place_batch(program, step):
    batch = batch_of(step)
    return jax.device_put(batch, program.batch_shardings(batch))


def digests(state):
    leaves = named_leaves(state)
    return array_digests({path: jax.random.key_data(leaf) if path == "key" else leaf for path, leaf in leaves.items()})


def summarize(name, directory, devices, steps, kill_after_steps):
    program = make_program(name, devices, steps)
    step = program.compile(place_batch(program, 0))
    stop = kill_after_steps or steps
    state, metrics = train(program, step, directory / name, steps // 2, stop)
    if kill_after_steps:
        return {}
    again, _ = train(program, step, directory / name, steps // 2, stop)
    return {"loss": float(metrics["loss"]), "digests": digests(state), "resumed": digests(again)}


if __name__ == "__main__":
    directory, (steps, kill_after_steps, devices) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    summaries = {name: summarize(name, directory, devices, steps, kill_after_steps) for name in sys.argv[5:]}
    if kill_after_steps:
        os.kill(os.getpid(), signal.SIGKILL)
    entropy = unigram_entropy(steps)
    sys.stdout.write(json.dumps({name: {**each, "unigram_entropy": entropy} for name, each in summaries.items()}))
