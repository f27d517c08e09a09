"""Memory use of a compiled program on one device, and its time at the device's peak rates."""

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
"""Share of a device's links that it can use to communicate with the given devices; None if the links are unknown."""


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Memory of one device while a program runs, in bytes.

    Attributes:
      argument_bytes: size of the arguments.
      output_bytes: size of the outputs.
      aliased_bytes: size of the outputs that reuse the memory of donated arguments.
      temporary_bytes: largest size of temporaries at one time, beyond arguments and outputs.
      code_bytes: size of the program itself, if the backend reports it.
      host_bytes: size of arguments and temporaries in the host's memory, such as an offloaded optimizer state and
        offloaded activations. `total_bytes` leaves them out.
    """

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    code_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Time in seconds that each part of a device needs at its peak rate; None means unknown.

    The predicted time of a step is the longest of the three, as if everything overlapped. Units below their peak rate,
    and parts that wait for each other, make a run longer. Data that stays in a cache, such as a GPU's L2, makes
    `memory_s` shorter.

    Attributes:
      compute_s: time for the FLOPs.
      memory_s: time for the main-memory traffic.
      network_s: time for the collectives within slices.
    """

    compute_s: float | None
    memory_s: float | None
    network_s: float | None

    @property
    def step_s(self) -> float | None:
        """Longest of the three times; None if one is unknown."""
        terms = (self.compute_s, self.memory_s, self.network_s)
        known = [term for term in terms if term is not None]
        return max(known) if len(known) == len(terms) else None

    @property
    def binding(self) -> str | None:
        """Name of the longest time: "compute", "memory" or "network"; None if a time is unknown."""
        terms = {"compute": self.compute_s, "memory": self.memory_s, "network": self.network_s}
        return next((name for name, term in terms.items() if term is not None and term == self.step_s), None)


@dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """Cost of one run of a compiled program on one device.

    Attributes:
      memory: memory that the program occupies.
      flops: FLOPs of the products that the device runs, whether the model needs them or not, without
        `uncounted_kernels`.
      traffic_bytes: bytes read from and written to main memory.
      collectives: collectives in program order.
      unknown_loops: loops of unknown trip count; their bodies count once.
      uncounted_kernels: names of the kernels whose FLOPs are unknown.
      roofline: time at the device's peak rates.
    """

    memory: ProgramMemory
    flops: Flops
    traffic_bytes: int
    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    uncounted_kernels: tuple[str, ...]
    roofline: Roofline


def program_cost(
    compiled: "jax.stages.Compiled",
    devices: Sequence["jax.Device"],
    chip: Chip,
    *,
    link_share: LinkShare,
    slice_of: Callable[["jax.Device"], int] = lambda device: 0,
) -> ProgramCost:
    """Computes the cost of a program from its compiled form, without running the program.

    Args:
      devices: devices that the program was compiled for, in mesh order.
      chip: chip that the devices are, or are parts of.
      link_share: share of the chip's links between devices, such as `Target.link_share`.
      slice_of: slice that has a device, such as `Target.slice_of`. The network between slices is not known, so its
        time is not counted.

    Raises:
      HardwareError: the compiled form cannot be read.
    """
    module = parse_hlo(compiled.as_text() or "")
    flops, traffic = executed_flops(module), memory_traffic(module)
    places: Sequence[int] = [slice_of(device) for device in devices]
    if devices[0].platform == "tpu":  # whose collectives number the devices within a slice
        devices = [device for device, place in zip(devices, places, strict=True) if place == places[0]]
        places = ()
    found = collectives(module, len(devices), places)
    # A device may be a part of a chip, such as a core.
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
    """Reads how much memory a compiled program takes on one device.

    Raises:
      HardwareError: the compiler does not report the memory.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise HardwareError("The compiler does not report the program's memory usage; update jax and its plugins.")
    resident = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    # XLA's size of temporaries includes other memories, such as VMEM. Its peak does not, but is wrong on CPUs, and it
    # counts temporaries in the host's memory.
    is_peak_known = platform != "cpu" and not stats.host_temp_size_in_bytes
    peak = stats.peak_memory_in_bytes if is_peak_known else 0
    return ProgramMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
        temporary_bytes=peak - resident if peak > resident else stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        host_bytes=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    )


def _network_s(
    found: Sequence[Collective], devices: Sequence["jax.Device"], chip: Chip, part: float, link_share: LinkShare
) -> float | None:
    """Sums the times of the collectives on the devices' links; None if a bandwidth is unknown."""
    seconds = 0.0
    for collective in found:
        if collective.between_slices:
            continue
        share = link_share([devices[place] for place in collective.group])
        if share is None or chip.link_bandwidth_bytes_s is None:
            return None
        seconds += collective.times * collective.sent_bytes / (chip.link_bandwidth_bytes_s * part * share)
    return seconds
