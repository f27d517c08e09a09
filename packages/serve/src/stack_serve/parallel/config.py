"""Configuration of the engines of one server."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.runtime.config import ClusterConfig

__all__ = ["ParallelConfig", "RouterName"]

RouterName = Literal["cache_aware", "round_robin"]

_ORPHAN_S = 1.0  # agents that lose their server end at once, since no other takes them over


@config
class ParallelConfig:
    """Engines of one server, each in a process of its own.

    Attributes:
      data_parallel: number of engines that compute different requests (vLLM: `data_parallel_size`). Each has a copy of
        the weights, and an equal share of the devices; on CPUs, of the cores.
      router: choice of the engine of a request. "cache_aware" is the engine with the longest cached prefix of the
        prompt, within a bound on its load (see `Router`); "round_robin" takes turns.
      prefill_engines: number of further engines that compute the keys of prompts, which the others then continue
        (disaggregated prefill). Long prompts do not slow down the generation of other requests then.
      hosts: number of hosts over which one engine is sharded, with an equal number of its devices on each.
      launcher: name of the launcher that starts the agents of the hosts. "processes" is this machine.
      cluster_address: "host:port" where this process listens for the hosts; port 0 picks a free one.
      token_file: file with the secret shared by the hosts; None generates one.
    """

    data_parallel: PositiveInt = 1
    prefill_engines: NonNegativeInt = 0
    router: RouterName = "cache_aware"
    hosts: PositiveInt = 1
    launcher: str = "processes"
    cluster_address: str = "127.0.0.1:0"
    token_file: str | None = None

    def __post_init__(self) -> None:
        if self.hosts > 1 and self.engines > 1:
            name = "prefill_engines" if self.prefill_engines else "data_parallel"
            raise ConfigError(
                f"hosts={self.hosts} and {name}={getattr(self, name)}: only one engine can be sharded over hosts. "
                "Leave one of the two out."
            )

    @property
    def engines(self) -> int:
        """Number of all engines."""
        return self.data_parallel + self.prefill_engines

    @property
    def cluster(self) -> ClusterConfig:
        """The hosts of one engine."""
        return ClusterConfig(
            hosts=self.hosts,
            launcher=self.launcher,
            address=self.cluster_address,
            token_file=self.token_file,
            orphan_s=_ORPHAN_S,
        )
