"""Peak rates and memory sizes of a kind of accelerator or CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chip"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak rates and sizes of one `unit` of a kind of hardware; None, or a missing dtype, means "unknown".

    Attributes:
      kind: name in the registry, or JAX's `device_kind` if no row is registered.
      unit: scope of the numbers. "device": one JAX device. "core": one core of a chip with several JAX devices, such as
        one half of a TPU v7x. "chip": all JAX devices at one location, such as all devices of a CPU.
      peak_flops: FLOP/s of dense matrix products by operand dtype, such as "bfloat16"; integer operations count
        likewise. "float32" is the rate at JAX's default precision, which rounds operands to TF32 on NVIDIA GPUs and to
        bfloat16 on TPUs; "float32/highest" is the rate at `precision="highest"`, if it differs.
      hbm_bytes: size of the memory that holds arrays.
      hbm_bandwidth_bytes_s: bytes read and written per second.
      on_chip_bytes: largest memory that kernels can keep data in: VMEM, L2, or a CPU's last-level cache.
      link_bandwidth_bytes_s: bandwidth to other units, in one direction, over all links.
      provenance: source of the numbers.
      model: distinguishes chips of one kind, such as a CPU's name and cores; "" if the kind is sufficient.
    """

    kind: str
    unit: Literal["core", "device", "chip"]
    peak_flops: Mapping[str, float] = field(hash=False)
    hbm_bytes: int | None
    hbm_bandwidth_bytes_s: float | None
    on_chip_bytes: int | None
    link_bandwidth_bytes_s: float | None
    provenance: str
    model: str = ""
