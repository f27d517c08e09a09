"""Launchers, which start a cluster's agents on its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Invitation", "Launcher"]


@dataclass(frozen=True)
class Invitation:
    """The parameters with which an agent starts and finds its driver.

    Attributes:
      address: "host:port" where the driver listens.
      token: shared secret, hexadecimal.
      host: the agent's number in the cluster; None lets the driver assign the lowest free number.
      orphan_s: seconds that the agent keeps running without a driver.
      preload: modules that the agent imports before it forks workers.
      follows_parent: whether the agent ends with the process that started it.
    """

    address: str
    token: str
    host: int | None = None
    orphan_s: float = 60.0
    preload: tuple[str, ...] = ()
    follows_parent: bool = False


@runtime_checkable
class Launcher(Protocol):
    """An interface that starts agents on hosts; agents fork the workers. Constructed from the run's `ClusterConfig`.

    A launcher is used from one thread. Its agents outlive the process of the launcher, and another driver can attach to
    them. Hence `end` takes the pid that the agent reported, since this launcher may not have started it.
    """

    def start(self, host: int, invitation: Invitation) -> None:
        """Starts the agent of a host, or arranges its start; returns before the agent is up."""
        ...

    def end(self, host: int, pid: int | None) -> None:
        """Kills the agent of a host if this launcher can reach it; an agent that has already ended is not an error."""
        ...

    def problem(self, host: int) -> str | None:
        """Returns the reason why the agent of a host will not start, or None if the launcher knows of no reason."""
        ...

    def close(self) -> None:
        """Frees the launcher's resources; agents keep running."""
        ...
