"""Training on the hosts of a cluster: the entry point of each worker, and the driver that supervises the workers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.abi.event_bus import EventBus
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.runtime.processes import join
from stack_core.runtime.signals import stop_requests
from stack_core.runtime.supervised import Job, supervise
from stack_core.runtime.worker import current_worker
from stack_train.observers.terminal import TerminalObserver
from stack_train.run.config import RunConfig
from stack_train.run.loop import RunSummary
from stack_train.run.train import train
from stack_train.storage.address import is_storage

__all__ = ["train_on_cluster", "worker"]

_PRELOAD = ("stack_train.run.cluster", "orbax.checkpoint", "stack_core.ops")


def train_on_cluster(
    config: RunConfig, *, resume: bool = False, allow: Sequence[str] = (), terminal: bool = False
) -> RunSummary:
    """Trains on `config.cluster.hosts` hosts and recovers from failures of workers and hosts; otherwise as `train`.

    A range of hosts changes the mesh between formations, each of which resumes from a checkpoint. Its batches stay the
    same, since they depend only on the seed and the step.

    If the driver of the run was killed, the new driver attaches to its agents, which keep the run alive for
    `cluster.orphan_s` seconds.

    Raises:
      RunAbandoned: the run keeps failing.
      StackError: the config, the data, the directory, a checkpoint or a host is not usable.
    """
    if is_storage(config.output):
        raise ConfigError(
            f"output is {config.output!r}, but cluster.hosts is set: runs on several hosts need a directory that "
            "all of them share. Mount the bucket, or set output to a shared directory."
        )
    arguments = {"config": to_mapping(config), "resume": resume, "allow": list(allow)}
    job = Job("stack_train.run.cluster:worker", arguments, _PRELOAD)
    with stop_requests() as stop, EventBus([TerminalObserver(live=terminal)]) as bus:
        found: dict[str, Any] = supervise(job, config.cluster, Path(config.output), observe=bus.emit, stop=stop)
    found["directory"] = Path(found["directory"])
    return RunSummary(**found)


def worker(config: dict[str, Any], resume: bool, allow: list[str]) -> dict[str, Any]:
    """Trains as one rank of a formation. Every formation after the first resumes the run if it has started."""
    member = current_worker()
    assert member is not None, "an agent forked this process"
    _keep_small_programs()
    wanted = parse(RunConfig, config)
    wanted = replace(
        wanted, processes=replace(member.order.processes, start_timeout_s=wanted.processes.start_timeout_s)
    )
    processes = join(wanted.processes)
    if member.order.formation > 1:
        directory = RunDirectory(Path(wanted.output))
        resume = processes.on_first("resume", directory.config.exists)
    return _plain(train(wanted, resume=resume, allow=allow))


def _keep_small_programs() -> None:
    """Caches every compiled program on disk, since each formation compiles the programs of the formation before."""
    import jax

    keep_compiled()
    # By default JAX skips programs that compile in less than 1 s; -1 lifts the minimum size of a file.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _plain(summary: RunSummary) -> dict[str, Any]:
    return {**dataclasses.asdict(summary), "directory": str(summary.directory)}
