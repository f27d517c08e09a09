"""One run in two processes, each with its share of the devices of one mesh."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_train.checkpoint import CheckpointStore
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train

CONFIG = {
    "model": {
        "name": "llama",
        "vocab_size": 280,
        "layers": 1,
        "embed": 16,
        "heads": 2,
        "mlp": 24,
        "dtype": "float32",
    },
    "data": {"seq_tokens": 16, "batch_size": 8, "validation_fraction": 0.2},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "run": {"steps": 20},
    "checkpoint": {"every_steps": 2, "keep": 10},
    "mesh": {"fsdp": 2, "tensor": 2},
    "processes": {"start_timeout_s": 60, "heartbeat_timeout_s": 60},
}


class Runner:
    """Starts runs of one config over a small corpus, in one process or several on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        texts = root / "texts"
        texts.mkdir()
        rng = np.random.default_rng(0)
        words = ["alpha", "beta", "gamma", "delta", "return", "yield", "(x)", "\n"]
        for number in range(20):
            (texts / f"{number}.txt").write_text(" ".join(rng.choice(words, 200)))
        self.config = root / "run.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | {"source": f"text:{texts}/*.txt"}}))

    def start(self, output, *arguments, devices, ids=(0,), count=1, each=None):
        """Processes of one run; `each` has further arguments of some of them, by their ids."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "XDG_CACHE_HOME": str(self.root / "cache"),
        }
        command = [sys.executable, "-m", "stack_core", "train", str(self.config)]
        command += ["--output", str(self.root / output)]
        together = ["--processes.count", str(count), "--processes.coordinator", f"127.0.0.1:{port}"]
        return [
            subprocess.Popen(
                [*command, *together, "--processes.id", str(place), *arguments, *(each or {}).get(place, ())],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for place in ids
        ]

    def run(self, output, *arguments, **options):
        """What the processes of a run printed, once all have ended well."""
        return self.ended(self.start(output, *arguments, **options), status=0)

    @staticmethod
    def ended(processes, status):
        said = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [status] * len(processes), "\n".join(said)
        return said

    def losses(self, output):
        lines = (self.root / output / "metrics.jsonl").read_text().splitlines()
        return {(record["kind"], record["step"]): record["loss"] for record in map(json.loads, lines)}

    def checkpoint(self, output, step):
        return self.root / output / "checkpoints" / f"{step:08d}"

    def digests(self, output, step):
        """Of every leaf of a checkpoint: equal ones are equal bit for bit."""
        manifest = json.loads((self.checkpoint(output, step) / "manifest.json").read_text())
        return {name: leaf["digest"] for name, leaf in manifest["content"]["leaves"].items()}


TWO = {"devices": 2, "ids": (0, 1), "count": 2}


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A runner with a whole run of two processes."""
    runner = Runner(tmp_path_factory.mktemp("processes"))
    runner.said = runner.run("whole", **TWO)
    return runner


def killed_after(runner, output, step, victim, number, world=TWO, *arguments):
    """Sends a signal to one process of a run once a checkpoint is there, and returns all of them."""
    processes = runner.start(output, *arguments, **world)
    until_s = time.monotonic() + 240
    while not runner.checkpoint(output, step).exists():
        assert all(process.poll() is None for process in processes), Runner.ended(processes, 0)
        assert time.monotonic() < until_s
        time.sleep(0.002)
    processes[victim].send_signal(number)
    return processes


def assert_like_the_whole_run(runner, output):
    assert runner.digests(output, 20) == runner.digests("whole", 20)
    assert runner.losses(output) == runner.losses("whole")


def test_two_processes_train_what_one_trains(runner, monkeypatch):
    ramp = "[{rows: 4, steps: 2}]"
    small = ("--run.steps", "3", "--mesh.tensor", "1", "--data.validation_fraction", "0.0", "--run.ramp", ramp)
    said = runner.run("two", *small, devices=1, ids=(0, 1), count=2)
    assert "step 3/3" in said[0] and "step" not in said[1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(runner.root / "cache"))
    mapping = load_yaml(runner.config) | {"output": str(runner.root / "one"), "mesh": {}}
    alone = parse(
        RunConfig, apply_overrides(mapping, ["run.steps=3", "data.validation_fraction=0.0", f"run.ramp={ramp}"])
    )
    train(alone)
    np.testing.assert_allclose(list(runner.losses("two").values()), list(runner.losses("one").values()), rtol=1e-5)

    program = build_program(alone)  # and one process opens what two have saved
    states = []
    for output in ("one", "two"):
        with CheckpointStore(runner.root / output / "checkpoints") as store:
            restored = store.restore(program.abstract_state)
            states.append(jax.tree.leaves(restored.state.params))
            assert restored.data_state["step"] == 3 and restored.data_state["batches"]["batches"] == 2
    for one, two in zip(*states, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_twenty_steps_of_two_processes_are_those_of_one(whole):
    whole.run("one", devices=4)
    one, two = whole.losses("one"), whole.losses("whole")
    assert one.keys() == two.keys() and ("evaluation", 20) in two
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-6)


@pytest.mark.slow
def test_after_a_kill_all_go_on_and_end_as_if_nothing_had_been(whole):
    survivor, killed = killed_after(whole, "killed", 4, 1, signal.SIGKILL)
    said, _ = (process.communicate(timeout=120)[0] for process in (survivor, killed))
    assert killed.returncode == -signal.SIGKILL and survivor.returncode == 2, said
    assert "Process 0 has lost another process of this run" in said and "--resume" in said
    assert not whole.checkpoint("killed", 20).exists()
    whole.run("killed", "--resume", **TWO)
    assert_like_the_whole_run(whole, "killed")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(whole):
    Runner.ended(killed_after(whole, "stopped", 4, 1, signal.SIGTERM), status=0)
    stopped = max(int(path.name) for path in (whole.root / "stopped" / "checkpoints").iterdir())
    assert 4 <= stopped < 20
    whole.run("stopped", "--resume", **TWO)
    assert_like_the_whole_run(whole, "stopped")


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_began_and_two_with_what_one_did(whole):
    Runner.ended(killed_after(whole, "moved", 4, 0, signal.SIGTERM, TWO), status=0)
    Runner.ended(killed_after(whole, "moved", 12, 0, signal.SIGTERM, {"devices": 4}, "--resume"), status=0)
    whole.run("moved", "--resume", **TWO)
    moved, expected = whole.losses("moved"), whole.losses("whole")
    assert moved.keys() == expected.keys()
    np.testing.assert_allclose(list(moved.values()), list(expected.values()), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "each", "parts"),
    [
        (
            (),
            {1: ("--optimizer.learning_rate", "0.5")},
            [
                "The config of process 1 differs from process 0",
                "optimizer.learning_rate: 0.5, not 0.01",
                "Process 1 of this run failed: ConfigError",
            ],
        ),
        (("--mesh.tensor", "3"), None, ["takes 6 devices, but there are 4 (2 processes with 2 each)"]),
        (("--data.batch_size", "3"), None, ["axis 0, 'batch', has size 3"]),
    ],
    ids=["config", "mesh", "batch"],
)
def test_what_does_not_fit_ends_all_with_its_reason(whole, arguments, each, parts):
    said = Runner.ended(whole.start("refused", *arguments, each=each, **TWO), status=2)
    for part in parts:
        assert part in "".join(said), said
    assert not (whole.root / "refused").exists()
