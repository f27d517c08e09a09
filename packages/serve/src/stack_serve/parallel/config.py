"""Configuration of the engines of one server."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config

__all__ = ["ParallelConfig", "RouterName"]

RouterName = Literal["cache_aware", "round_robin"]


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
    """

    data_parallel: PositiveInt = 1
    prefill_engines: NonNegativeInt = 0
    router: RouterName = "cache_aware"

    @property
    def engines(self) -> int:
        """Number of all engines."""
        return self.data_parallel + self.prefill_engines
