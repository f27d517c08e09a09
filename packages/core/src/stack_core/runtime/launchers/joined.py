"""Agents that somebody else starts on each host, as SLURM, JobSet and TPU pods do: `stack cluster join` dials in."""

import os
import socket
from pathlib import Path

from stack_core.abi.errors import ConfigError
from stack_core.abi.launchers import Invitation
from stack_core.runtime.agent import Agent, prepared
from stack_core.runtime.config import ClusterConfig, parsed_address
from stack_core.runtime.record import read_token

__all__ = ["JoinedLauncher", "join_cluster"]

_NUMBERS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")


class JoinedLauncher:
    """Waits for hosts that join; it cannot end an agent, which ends when its driver hangs up for good."""

    def __init__(self, config: ClusterConfig) -> None:
        if config.token_file is None or parsed_address(config.address)[1] == 0:
            raise ConfigError(
                "The launcher joined needs cluster.token_file and a cluster.address with a port, as hosts that join "
                f"must know both; they are {config.token_file!r} and {config.address!r}. Make a token by `openssl rand "
                "-hex 32 > token`, start the driver with --cluster.token_file token --cluster.address "
                f"{socket.gethostname()}:8477, and each host with `stack cluster join ADDRESS --token-file token`."
            )

    def start(self, host: int, invitation: Invitation) -> None:
        """Does nothing: the host comes by itself."""

    def end(self, host: int, pid: int | None) -> None:
        """Does nothing: the driver hangs up, and a new formation keeps what an old one may still do from counting."""

    def problem(self, host: int) -> str | None:
        return None

    def close(self) -> None:
        """Has nothing to free."""


def join_cluster(address: str, token_file: Path, host: int | None, orphan_s: float) -> str | None:
    """Is the agent of this host until the driver lets it go; returns why it was refused, or gave up, if so.

    Raises:
      ConfigError: the address or the token cannot be read.
    """
    parsed_address(address, "The address")
    token = read_token(token_file)
    number = host if host is not None else _given_number()
    agent = Agent(Invitation(address, token.hex(), number, orphan_s), prepared(()))
    agent.serve()
    return agent.refusal


def _given_number() -> int | None:
    """The number that whoever started this host gave it."""
    found = next((os.environ[name] for name in _NUMBERS if os.environ.get(name)), None)
    if found is not None and not found.isdecimal():
        raise ConfigError(f"The environment says that this host is number {found!r}; expected a number. Pass --host.")
    return int(found) if found is not None else None
