"""Launchers: how the agents of a cluster come to its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Invitation", "Launcher"]


@dataclass(frozen=True)
class Invitation:
    """What an agent is started with, and needs to find its driver.

    Attributes:
      address: "host:port" where the driver listens.
      token: the secret that they share, hexadecimal.
      host: the agent's number in the cluster; None lets the driver give it the lowest that is free.
      orphan_s: how long the agent goes on without a driver.
      preload: modules that it imports before it forks workers.
      follows_parent: end with the process that started it.
    """

    address: str
    token: str
    host: int | None = None
    orphan_s: float = 60.0
    preload: tuple[str, ...] = ()
    follows_parent: bool = False


@runtime_checkable
class Launcher(Protocol):
    """Starts agents on hosts, and no workers: an agent forks those. Made of the run's `ClusterConfig`.

    A launcher is used from one thread. Its agents outlive the process that it runs in, so that another driver can
    attach; `end` takes the pid that the agent itself told, as the launcher may not have started it.
    """

    def start(self, host: int, invitation: Invitation) -> None:
        """Starts the agent of a host, or sees to it that one will come; returns before it is there."""
        ...

    def end(self, host: int, pid: int | None) -> None:
        """Ends the agent of a host by force, if this launcher can reach it; one that is gone already is no error."""
        ...

    def problem(self, host: int) -> str | None:
        """Why the agent of a host will not come, as far as the launcher knows."""
        ...

    def close(self) -> None:
        """Frees what the launcher holds; agents are not its concern any more."""
        ...
