"""Agents started externally on each host, by SLURM, JobSet or a TPU pod, which connect by `stack cluster join`."""

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
    """A launcher that waits for hosts to join.

    It cannot end an agent; the agent ends after its driver closes the connection permanently.
    """

    def __init__(self, config: ClusterConfig) -> None:
        if config.token_file is None or parsed_address(config.address)[1] == 0:
            raise ConfigError(
                "The launcher joined needs cluster.token_file and a cluster.address with a port, as hosts that join "
                f"must know both; they are {config.token_file!r} and {config.address!r}. Make a token by `openssl rand "
                "-hex 32 > token`, start the driver with --cluster.token_file token --cluster.address "
                f"{socket.gethostname()}:8477, and each host with `stack cluster join ADDRESS --token-file token`."
            )

    def start(self, host: int, invitation: Invitation) -> None:
        """Does nothing, since hosts join on their own."""

    def end(self, host: int, pid: int | None) -> None:
        """Does nothing: the driver closes the connection, and messages of old formations are ignored."""

    def problem(self, host: int) -> str | None:
        return None

    def close(self) -> None:
        """Does nothing."""


def join_cluster(address: str, token_file: Path, host: int | None, orphan_s: float) -> str | None:
    """Runs the agent of this host until the driver releases it; returns the reason of a refusal or timeout, or None.

    Raises:
      ConfigError: the address or the token cannot be read.
    """
    parsed_address(address, "The address")
    token = read_token(token_file)
    number = host if host is not None else _scheduler_number()
    agent = Agent(Invitation(address, token.hex(), number, orphan_s), prepared(()))
    agent.serve()
    return agent.refusal


def _scheduler_number() -> int | None:
    """Returns the host number assigned by the scheduler's environment variables, or None."""
    found = next((os.environ[name] for name in _NUMBERS if os.environ.get(name)), None)
    if found is not None and not found.isdecimal():
        raise ConfigError(f"This host's number in the environment is {found!r}; expected a number. Pass --host.")
    return int(found) if found is not None else None
