"""Chips: the peak rates and sizes of one kind of hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Chip"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The peak rates and sizes of one `unit` of a kind of hardware; None, or a missing dtype, is "not known".

    Attributes:
      kind: its name in the registry, or JAX's `device_kind` where no row is registered.
      unit: what the numbers are of. "device": one JAX device. "core": one of the cores of a chip, each of them a JAX
        device, such as the halves of a TPU v7x. "chip": all JAX devices at one place, such as all devices of a CPU.
      peak_flops: FLOP/s of dense matrix products by the dtype of the operands, such as "bfloat16"; integer operations
        count likewise. "float32" is the rate at JAX's default precision, which rounds the operands to TF32 on NVIDIA's
        GPUs and to bfloat16 on TPUs; "float32/highest" that at `precision="highest"`, where it is another.
      hbm_bytes: size of the memory that holds arrays.
      hbm_bandwidth_bytes_s: bytes read and written per second.
      on_chip_bytes: the largest memory that kernels can keep data in: VMEM, L2, a CPU's last-level cache.
      link_bandwidth_bytes_s: to other units, one direction, all links together.
      provenance: where the numbers come from.
      model: what tells chips of one kind apart, such as a CPU's name and cores; "" where the kind says it all.
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
