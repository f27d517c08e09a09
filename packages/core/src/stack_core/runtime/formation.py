"""A formation: fresh processes on several hosts, joined into one JAX program, never repaired (pure)."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stack_core.abi.errors import ClusterError

__all__ = ["Formation", "Member", "formed", "mesh_sizes", "updated"]

Status = Literal["starting", "running", "done", "dead"]


@dataclass
class Member:
    """One worker of a formation.

    Attributes:
      rank: rank in the formation.
      host: number of its host.
      status: "starting", "running", "done" or "dead".
      pid: process id on its host, once it is forked.
      step: latest step known to the driver; None before its first.
      exit_status: as `os.waitstatus_to_exitcode` returns it, negative for a signal; None while it runs.
      result: returned JSON value.
      error: {"type", "message", "mendable", "traceback"} of the exception that ended it.
      stopped: whether a signal has stopped the process for too long.
    """

    rank: int
    host: int
    status: Status = "starting"
    pid: int | None = None
    step: int | None = None
    exit_status: int | None = None
    result: Any = None
    error: dict[str, Any] | None = None
    stopped: bool = False


@dataclass
class Formation:
    """Processes that run one function together, one rank each.

    Attributes:
      number: ascending number within the cluster; messages of other formations are ignored.
      coordinator: address of JAX's coordinator, on the host of rank 0.
      members: the workers, by rank.
    """

    number: int
    coordinator: str
    members: list[Member] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        """Whether a member is dead, stopped or failed; the remaining members would then wait forever."""
        return any(member.status == "dead" or member.stopped or member.error is not None for member in self.members)

    @property
    def is_finished(self) -> bool:
        return all(member.status == "done" for member in self.members)

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.status in ("starting", "running")]

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(member.host for member in self.members)

    @property
    def step(self) -> int | None:
        """The last step that any member is known to have reached."""
        return max((member.step for member in self.members if member.step is not None), default=None)


def updated(formation: Formation, report: Mapping[str, Any], stopped_s: float) -> Member | None:
    """Applies an agent's report about a worker; returns its member, or None for another formation.

    Args:
      stopped_s: seconds after which a member stopped by a signal counts as stopped.
    """
    if report["formation"] != formation.number:
        return None
    member = formation.members[report["rank"]]
    member.pid, member.status = report["pid"], report["status"]
    member.exit_status = report.get("exit_status")
    member.result, member.error = report.get("result"), report.get("error")
    member.stopped = report.get("stopped_s", 0.0) >= stopped_s
    if report.get("step") is not None:
        # Reports, events and pings may arrive out of order.
        member.step = max(report["step"], member.step or 0)
    return member


def formed(number: int, coordinator: str, free: Collection[int], count: int) -> Formation:
    """Places `count` ranks on the lowest free hosts; successive formations thus get the same placement.

    Raises:
      ClusterError: fewer hosts are free.
    """
    hosts = sorted(free)
    if len(hosts) < count:
        there = ", ".join(map(str, hosts)) or "none"
        raise ClusterError(
            f"A formation needs {count} hosts, but {len(hosts)} are free (hosts {there}). "
            "Use a smaller mesh, end another one, or add hosts to the cluster."
        )
    return Formation(number, coordinator, [Member(rank, host) for rank, host in enumerate(hosts[:count])])


def mesh_sizes(axes: Mapping[str, int], devices: int, *, processes: int) -> dict[str, int] | None:
    """Returns the sizes of a mesh's axes over the devices of a formation; None for axes that do not fit.

    A mesh of several processes has all their devices, since each process must hold a part of every array. A mesh of one
    process may have fewer devices, the first of that process.

    Args:
      axes: sizes by name; at most one is -1 and takes the remaining devices.
      devices: number of devices of all processes.
    """
    left = devices // math.prod(size for size in axes.values() if size != -1)
    sizes = {name: left if size == -1 else size for name, size in axes.items()}
    taken = math.prod(sizes.values())
    return sizes if taken == devices or (processes == 1 and 0 < taken < devices) else None
