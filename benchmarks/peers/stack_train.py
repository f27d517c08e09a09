"""This repository's `stack train`, with core, train and kernels installed in the environment that runs the benchmark.

It trains on real text, whose tokenizer and tokens are in the cache before anything is measured; the others make up
their data.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from peers.peer import Command, Peer, Workload, run_quietly

__all__ = ["PEER", "WITHOUT_KERNELS", "fill_cache"]


def _install(folder: Path, workload: Workload) -> Path:
    """Leaves the environment alone, and fills the data cache."""
    fill_cache(PEER, Path(sys.executable), folder, workload)
    return Path(sys.executable)


def fill_cache(peer: Peer, python: Path, folder: Path, workload: Workload) -> None:
    """Trains a small model for one step, which leaves tokenizer and tokens in the data cache of an environment."""
    command = peer.command(python, replace(workload, layers=1, embed=8, heads=1, mlp=8), 1)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run_quietly(*command.arguments, folder=scratch)


def _command(python: Path, workload: Workload, steps: int) -> Command:
    return Command(
        arguments=_arguments(python, _options(workload, steps)),
        step_line=r'"kind": "train"',
        log="run/metrics.jsonl",
        environment={"JAX_PLATFORMS": "cpu"},
    )


def _command_without_kernels(python: Path, workload: Workload, steps: int) -> Command:
    command = _command(python, workload, steps)
    return replace(command, environment={**command.environment, "STACK_DISABLE_PLUGINS": "kernels"})


def _arguments(python: Path, options: dict[str, object]) -> list[str]:
    overrides = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [str(python.with_name("stack")), "train", str(_BASE), *overrides]


def _options(workload: Workload, steps: int) -> dict[str, object]:
    return {
        "output": "run",
        "model.vocab_size": workload.vocab,
        "model.embed": workload.embed,
        "model.layers": workload.layers,
        "model.heads": workload.heads,
        "model.mlp": workload.mlp,
        "model.max_positions": workload.seq_tokens,
        "model.dtype": workload.dtype,
        "data.seq_tokens": workload.seq_tokens,
        "data.batch_size": workload.batch,
        "run.steps": steps,
    }


_BASE = Path(__file__).with_name("stack_train.yaml")

PEER = Peer(
    name="stack",
    install=_install,
    command=_command,
    packages=("stack-core", "stack-train", "stack-kernels", "jax", "flax", "optax"),
)
WITHOUT_KERNELS = replace(
    PEER,
    name="stack without kernels",
    command=_command_without_kernels,
    packages=("stack-core", "stack-train", "jax", "flax", "optax"),
)
