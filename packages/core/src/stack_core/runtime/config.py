"""The config of a cluster: its hosts, and the timeouts after which silence counts as a failure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_core.runtime.host_range import HostRange

__all__ = ["ClusterConfig", "EngineProcessConfig", "parsed_address"]

_ENGINE_ORPHAN_S = 1.0


def _checked_hosts(hosts: Any) -> int | str | None:
    """Returns a number or a range of hosts in its plain form, for YAML: 4, or "2..4"."""
    if hosts is None:
        return None
    numbers = HostRange.parse(hosts)
    return numbers.maximum if numbers.is_fixed else str(numbers)


@config
class ClusterConfig:
    """The hosts of a run.

    Attributes:
      hosts: number of hosts, each with one agent and one worker; None runs in this process, without agents. A range
        such as 2..4 lets a run continue with fewer hosts after a loss, and with more after the next checkpoint when
        they are back. The batch stays the same. Numbers of hosts that do not divide the batch or the model are skipped.
      launcher: name of the launcher that starts the agents.
      address: "host:port" where the driver listens for agents and workers; port 0 picks a free one.
      token_file: file with the secret shared by agents and driver; None generates one for this cluster.
      interface: host name or address at which workers of different hosts reach each other; None uses the address at
        which each host reaches the driver.
      resources: resources that a launcher reserves on each host, such as {"CPU": 8, "TPU": 4} for ray.
      start_s: maximum seconds for agents to start, imports included.
      missing_s: seconds that a run with a range of hosts waits for missing ones, at the start once the smallest number
        is connected and after a loss, before it continues without them.
      silence_s: seconds without an answer after which an agent counts as lost.
      stopped_s: seconds after which a worker stopped by a signal counts as lost.
      deadline_s: seconds without a completed step, evaluation or save after which a formation counts as hanging.
      first_deadline_s: `deadline_s` before the first step, which includes compilation and reading checkpoints.
      orphan_s: seconds that agents keep running without a driver, during which another driver can attach.
      max_failures: maximum number of consecutive failures without a completed step before the run fails.
    """

    hosts: Annotated[int | str | None, BeforeValidator(_checked_hosts)] = None
    launcher: str = "processes"
    address: str = "127.0.0.1:0"
    token_file: str | None = None
    interface: str | None = None
    resources: Mapping[str, float] = Field(default_factory=dict)
    start_s: PositiveFloat = 300.0
    missing_s: NonNegativeFloat = 30.0
    silence_s: PositiveFloat = 10.0
    stopped_s: PositiveFloat = 3.0
    deadline_s: PositiveFloat = 600.0
    first_deadline_s: PositiveFloat = 3600.0
    orphan_s: NonNegativeFloat = 60.0
    max_failures: NonNegativeInt = 5

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"most_failures": "cluster.max_failures"})

    def __post_init__(self) -> None:
        if self.host_range.is_fixed and changed_fields(self, ["missing_s"]):
            raise ConfigError(
                f"cluster.missing_s is {self.missing_s}, which has no effect without a range of hosts. Set "
                "cluster.hosts to a range, such as 2..4, or leave cluster.missing_s out."
            )

    @property
    def host_range(self) -> HostRange:
        """The numbers of hosts with which the run may continue; 1 if `hosts` is None."""
        return HostRange.parse(self.hosts or 1)


@config
class EngineProcessConfig:
    """The process of a generation engine that does not share the trainer's process and devices.

    Attributes:
      launcher: name of the launcher that starts the agent whose worker runs the engine. "processes" is this machine.
      address: "host:port" where this process listens for the agent and the worker; port 0 picks a free one.
      token_file: file with the secret shared with the agent; None generates one.
      resources: resources that the launcher reserves, such as {"GPU": 1} for ray.
      environment: environment variables of the worker, set before JAX uses a device, such as CUDA_VISIBLE_DEVICES, with
        which two processes of one machine divide its GPUs.
      start_s: maximum seconds for the agent to start.
    """

    launcher: str = "processes"
    address: str = "127.0.0.1:0"
    token_file: str | None = None
    resources: Mapping[str, float] = Field(default_factory=dict)
    environment: Mapping[str, str] = Field(default_factory=dict)
    start_s: PositiveFloat = 300.0

    def __post_init__(self) -> None:
        if late := sorted(name for name in self.environment if name.startswith("JAX_")):
            raise ConfigError(
                f"environment has {', '.join(late)}, which JAX reads when it is imported, before the worker is forked. "
                f"Set {'it' if len(late) == 1 else 'them'} for the whole command."
            )

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster of one host. An agent that loses its driver ends at once, since no other driver takes it over."""
        shared = {name: getattr(self, name) for name in ("launcher", "address", "token_file", "resources", "start_s")}
        return ClusterConfig(hosts=1, orphan_s=_ENGINE_ORPHAN_S, **shared)


def parsed_address(address: str, field: str = "cluster.address") -> tuple[str, int]:
    """Splits "host:port" into host and port.

    Raises:
      ConfigError: the address has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{field} is {address!r}; expected 'host:port', such as 127.0.0.1:0 or 10.0.0.1:8477.")
    return host.strip("[]"), int(port)
