"""What a compiled program takes of a device: its memory, and how long it takes at the device's peaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_core.abi.chips import Chip
from stack_core.abi.errors import HardwareError
from stack_core.chips.devices import count_units
from stack_core.programs.flops import Flops
from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import Collective, collectives, executed_flops, memory_traffic, uncounted_kernels

if TYPE_CHECKING:
    import jax

__all__ = ["LinkShare", "ProgramCost", "ProgramMemory", "Roofline", "program_cost", "program_memory"]

LinkShare = Callable[[Sequence["jax.Device"]], float | None]
"""The share of a device's links that it can use to talk to the given devices; None where no link is known."""


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Bytes of one device's memory while a program runs.

    Attributes:
      aliased_bytes: of the outputs, what takes the place of donated arguments.
      temporary_bytes: the most that exists at one time beside arguments and outputs.
      code_bytes: of the program itself, where the backend says so.
    """

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds that each part of a device needs at its peak; None is "not known".

    The step's time is predicted as that of the longest, as if everything overlapped. Units that are not at their peak,
    and parts that wait for each other, make a run longer; what stays in a cache, a GPU's L2, makes `memory_s` shorter.
    """

    compute_s: float | None
    memory_s: float | None
    network_s: float | None

    @property
    def step_s(self) -> float | None:
        """The longest; None when one of them is not known."""
        terms = (self.compute_s, self.memory_s, self.network_s)
        known = [term for term in terms if term is not None]
        return max(known) if len(known) == len(terms) else None

    @property
    def binding(self) -> str | None:
        """Which of them is the longest: "compute", "memory" or "network"."""
        terms = {"compute": self.compute_s, "memory": self.memory_s, "network": self.network_s}
        return next((name for name, term in terms.items() if term is not None and term == self.step_s), None)


@dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """What one device does in one run of a compiled program.

    Attributes:
      flops: products that it runs, whether the model needs them or not; `uncounted_kernels` are left out.
      traffic_bytes: to and from its main memory.
      unknown_loops: loops whose trips are not known; their bodies count once.
    """

    memory: ProgramMemory
    flops: Flops
    traffic_bytes: int
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    uncounted_kernels: tuple[str, ...]
    roofline: Roofline


def program_cost(
    compiled: "jax.stages.Compiled", devices: Sequence["jax.Device"], chip: Chip, *, link_share: LinkShare
) -> ProgramCost:
    """Reads the cost of a program from its compiled form; nothing runs.

    Args:
      devices: those it was compiled for, in the order of its mesh.
      chip: what they are, or are parts of.

    Raises:
      HardwareError: the compiled form cannot be read.
    """
    module = parse_hlo(compiled.as_text() or "")
    flops, traffic = executed_flops(module), memory_traffic(module)
    found = collectives(module, len(devices))
    part = count_units(chip, devices) / len(devices)
    bandwidth = chip.hbm_bandwidth_bytes_s
    ideal_s = flops.ideal_s(chip)
    return ProgramCost(
        memory=program_memory(compiled, devices[0].platform),
        flops=flops,
        traffic_bytes=traffic,
        collectives=found,
        unknown_loops=module.unknown_loops(),
        uncounted_kernels=uncounted_kernels(module),
        roofline=Roofline(
            compute_s=None if ideal_s is None else ideal_s / part,
            memory_s=None if bandwidth is None else traffic / (bandwidth * part),
            network_s=_network_s(found, devices, chip, part, link_share),
        ),
    )


def program_memory(compiled: "jax.stages.Compiled", platform: str) -> ProgramMemory:
    """Reads what a compiled program takes of one device's memory.

    Raises:
      HardwareError: the compiler does not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise HardwareError("The compiler does not say how much memory the program takes; update jax and its plugins.")
    resident = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    # XLA sums temporaries over all memories, VMEM included; its peak is of main memory alone, and wrong on CPUs.
    peak = 0 if platform == "cpu" else stats.peak_memory_in_bytes
    return ProgramMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temporary_bytes=peak - resident if peak > resident else stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )


def _network_s(
    found: Sequence[Collective], devices: Sequence["jax.Device"], chip: Chip, part: float, link_share: LinkShare
) -> float | None:
    seconds = 0.0
    for collective in found:
        share = link_share([devices[place] for place in collective.group])
        if share is None or chip.link_bandwidth_bytes_s is None:
            return None
        seconds += collective.times * collective.sent_bytes / (chip.link_bandwidth_bytes_s * part * share)
    return seconds
