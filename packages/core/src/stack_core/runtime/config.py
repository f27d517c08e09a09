"""Which hosts a run has, and how soon their silence is taken for a failure."""

from collections.abc import Mapping

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError

__all__ = ["ClusterConfig", "parsed_address"]


@config
class ClusterConfig:
    """The hosts of a run.

    Attributes:
      hosts: how many there are, each with one agent and one worker; None runs in this process, without agents.
      launcher: what starts the agents.
      address: "host:port" where the driver listens for agents and workers; port 0 takes a free one.
      token_file: holds the secret that agents and driver share; None makes one for this cluster.
      interface: the host name or address by which workers of different hosts reach each other; None takes the
        address at which each host reaches the driver.
      resources: what a launcher reserves on each host, such as {"CPU": 8, "TPU": 4} for ray.
      start_s: how long the driver waits for agents to start, imports included.
      silence_s: after how long an agent that answers nothing is taken for lost.
      stopped_s: after how long a worker that a signal has stopped is taken for lost.
      deadline_s: after how long without a completed step, evaluation or save a formation is taken to hang.
      first_deadline_s: the same before its first step, in which programs are compiled and checkpoints read.
      orphan_s: how long agents go on without a driver, so that another can attach.
      most_failures: in a row, without a completed step between them, before a run is given up.
    """

    hosts: PositiveInt | None = None
    launcher: str = "processes"
    address: str = "127.0.0.1:0"
    token_file: str | None = None
    interface: str | None = None
    resources: Mapping[str, float] = Field(default_factory=dict)
    start_s: PositiveFloat = 300.0
    silence_s: PositiveFloat = 10.0
    stopped_s: PositiveFloat = 3.0
    deadline_s: PositiveFloat = 600.0
    first_deadline_s: PositiveFloat = 3600.0
    orphan_s: NonNegativeFloat = 60.0
    most_failures: NonNegativeInt = 5


def parsed_address(address: str, field: str = "cluster.address") -> tuple[str, int]:
    """The host and the port of "host:port".

    Raises:
      ConfigError: it has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{field} is {address!r}; expected 'host:port', such as 127.0.0.1:0 or 10.0.0.1:8477.")
    return host.strip("[]"), int(port)
