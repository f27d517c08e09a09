"""Root-cause attribution of a formation's end (pure).

When one process dies, its peers follow within milliseconds: by "connection reset", by an abort of JAX's runtime, or
because the driver ends them. Any of them may be observed first. The driver therefore collects all deaths within a
short interval, and this module determines which came first.
"""

import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from stack_core.runtime.formation import Formation, Member

__all__ = ["Failure", "attributed"]

Kind = Literal["lost host", "signal", "stopped", "error", "exit", "hang"]

# Signs of JAX, Gloo, NCCL and gRPC in processes that lost a peer.
_CASUALTIES = (
    "has lost another process",
    "of this run failed",
    "Gloo",
    "Connection closed by peer",
    "Connection reset",
    "Socket closed",
    "NCCL",
    "UNAVAILABLE",
    "coordination service",
    "DEADLINE_EXCEEDED",
    "heartbeat",
)


@dataclass(frozen=True)
class Failure:
    """The cause of a formation's end.

    Attributes:
      kind: class of the failure.
      rank: rank that caused it; None for a hang that cannot be attributed.
      host: host of that rank, or None.
      step: last step that the formation began; None before its first.
      evidence: message, traceback or signal of the culprit.
      mendable: whether it is the user's error, which would recur in another formation.
      signal: name of the signal, or None.
    """

    kind: Kind
    rank: int | None
    host: int | None
    step: int | None
    evidence: str
    mendable: bool = False
    signal: str | None = None

    def __str__(self) -> str:
        who = "no single rank" if self.rank is None else f"rank {self.rank} on host {self.host}"
        where = "before its first step" if self.step is None else f"at step {self.step}"
        return f"{who}: {self.evidence} ({where})"

    @property
    def place(self) -> tuple[Any, ...]:
        """The identity of a failure; two failures with equal places are considered the same."""
        return (self.kind, self.rank, self.signal, self.step, self.evidence if self.kind == "error" else "")


def attributed(formation: Formation, *, lost_hosts: Collection[int] = (), hangs_for_s: float | None = None) -> Failure:
    """Attributes a formation's end: a lost host, a signal from outside, a stopped worker, an own error, in this order.

    Args:
      lost_hosts: hosts whose agents are gone or silent.
      hangs_for_s: seconds without a completed step, if the formation ends because it hangs.
    """
    # The rank orders equal severities, because members cannot be compared.
    candidates = sorted((_severity(member, lost_hosts), member.rank, member) for member in formation.members)
    severity, _, culprit = candidates[0]
    # During a hang, a lost connection is a consequence.
    if severity == _INNOCENT or (severity == _CASUALTY and hangs_for_s is not None):
        return _hang(formation, hangs_for_s or 0.0)
    return _failure(formation, culprit, severity)


_LOST, _SIGNAL, _STOPPED, _ERROR, _EXIT, _ABORT, _CASUALTY, _INNOCENT = range(8)


def _severity(member: Member, lost_hosts: Collection[int]) -> int:
    """Ranks a member as the cause, most likely first (lowest number)."""
    if member.host in lost_hosts:
        return _LOST
    if member.stopped and member.status in ("starting", "running"):
        return _STOPPED
    if member.error is not None:  # its process may still be exiting
        return _CASUALTY if any(sign in str(member.error.get("message", "")) for sign in _CASUALTIES) else _ERROR
    if member.status != "dead":
        return _INNOCENT
    status = member.exit_status or 0
    if status < 0:
        return _ABORT if -status == signal.SIGABRT else _SIGNAL  # JAX aborts if its coordinator is gone
    return _EXIT


def _failure(formation: Formation, culprit: Member, severity: int) -> Failure:
    rank, host, step = culprit.rank, culprit.host, formation.step
    if severity == _LOST:
        return Failure("lost host", rank, host, step, "its agent is gone or does not answer")
    if severity == _STOPPED:
        return Failure("stopped", rank, host, step, "a signal has stopped it", signal="SIGSTOP")
    status = culprit.exit_status or 0
    if culprit.error is not None:
        error = culprit.error
        evidence = f"{error.get('type')}: {error.get('message')}"
        mendable = bool(error.get("mendable")) and severity == _ERROR
        return Failure("error", rank, host, step, evidence, mendable=mendable)
    if status < 0:
        name = signal.Signals(-status).name
        return Failure("signal", rank, host, step, f"ended by {name}", signal=name)
    return Failure("exit", rank, host, step, f"exited with status {status} and no result")


def _hang(formation: Formation, hangs_for_s: float) -> Failure:
    """Attributes a hang to the slowest worker, or to no worker if all are at the same step."""
    behind = min(formation.members, key=lambda member: -1 if member.step is None else member.step)
    steps = {member.step for member in formation.members}
    blamed = behind if len(steps) > 1 else None
    return Failure(
        "hang",
        None if blamed is None else blamed.rank,
        None if blamed is None else blamed.host,
        formation.step,
        f"no progress for {hangs_for_s:.1f} s",
    )
