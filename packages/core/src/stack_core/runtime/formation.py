"""A formation: fresh processes on some hosts, joined into one JAX program, never repaired. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stack_core.abi.errors import ClusterError

__all__ = ["Formation", "Member", "formed", "updated"]

Status = Literal["starting", "running", "done", "dead"]


@dataclass
class Member:
    """One worker of a formation.

    Attributes:
      pid: on its host, once it is forked.
      step: the last that it is known to have reached; None before its first.
      exit_status: as `os.waitstatus_to_exitcode` gives it, negative for a signal; None while it runs.
      result: what it returned, as JSON has it.
      error: {"type", "message", "mendable", "traceback"} of the exception that ended it.
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
    """Processes that run one function together, each in a rank.

    Attributes:
      number: of this formation in its cluster, rising; what belongs to another is ignored.
      coordinator: where JAX's coordinator listens, on the host of rank 0.
    """

    number: int
    coordinator: str
    members: list[Member] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        """Whether a member is dead, stopped or failed, so that the others wait in vain."""
        return any(member.status == "dead" or member.stopped or member.error is not None for member in self.members)

    @property
    def done(self) -> bool:
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


def updated(formation: Formation, facts: Mapping[str, Any], stopped_s: float) -> Member | None:
    """Takes what an agent tells of a worker; returns its member, or None where it is of another formation.

    Args:
      stopped_s: after how long a member that a signal stopped counts as stopped.
    """
    if facts["formation"] != formation.number:
        return None
    member = formation.members[facts["rank"]]
    member.pid, member.status = facts["pid"], facts["status"]
    member.exit_status = facts.get("exit_status")
    member.result, member.error = facts.get("result"), facts.get("error")
    member.stopped = facts.get("stopped_s", 0.0) >= stopped_s
    if facts.get("step") is not None:
        member.step = max(facts["step"], member.step or 0)
    return member


def formed(number: int, coordinator: str, free: Collection[int], count: int) -> Formation:
    """Places `count` ranks on the lowest free hosts, so that a formation that follows another is placed like it.

    Raises:
      ClusterError: there are fewer hosts.
    """
    hosts = sorted(free)
    if len(hosts) < count:
        there = ", ".join(map(str, hosts)) or "none"
        raise ClusterError(
            f"A formation of {count} hosts is wanted, and {len(hosts)} are free (hosts {there}). "
            "Ask for a smaller mesh, end another one, or give the cluster more hosts."
        )
    return Formation(number, coordinator, [Member(rank, host) for rank, host in enumerate(hosts[:count])])
