"""GPU parameters that XLA needs for cross-compilation, in addition to the chip's row.

Provenance: NVIDIA's architecture white papers and CUDA's table of compute capabilities, as in the device descriptions
that OpenXLA publishes for cross-compilation (`xla/backends/gpu/target_config/specs`: a100_sxm_80, h100_sxm, h200 and
b200).
"""

from dataclasses import dataclass
from typing import Final

from stack_core.abi.chips import Chip

__all__ = ["GPU_CONFIGS", "GpuConfig"]

_KIB = 2**10
# Without versions, XLA assumes a driver that cannot record loops and conditionals in CUDA graphs.
_CUDA = "13.0.0"


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """Compiler parameters of one kind of GPU. The limits of CUDA's programming model are the same for all of them.

    Attributes:
      compute_capability: (major, minor).
      cores: number of enabled streaming multiprocessors.
      fpus: number of fp32 units per core.
      shared_memory_bytes: shared memory per core.
      shared_memory_per_block_bytes: largest shared memory that one block can request.
      clock_ghz: maximum clock rate.
    """

    compute_capability: tuple[int, int]
    cores: int
    fpus: int
    shared_memory_bytes: int
    shared_memory_per_block_bytes: int
    clock_ghz: float

    def text_proto(self, chip: Chip, device_kind: str) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text.

        Args:
          chip: row of the GPU, for its L2 and main memory.
          device_kind: `device_kind` that JAX reports for the devices.
        """
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_core_limit: 65536  registers_per_block_limit: 65536  shared_memory_per_block: 49152
              core_count: {self.cores}  fpus_per_core: {self.fpus}  clock_rate_ghz: {self.clock_ghz}
              shared_memory_per_core: {self.shared_memory_bytes}
              shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
              l2_cache_size: {chip.on_chip_bytes}
              device_memory_size: {chip.hbm_bytes}  memory_bandwidth: {int(chip.hbm_bandwidth_bytes_s or 0)}
              cuda_compute_capability {{ major: {major}  minor: {minor} }}
              driver_version: "{_CUDA}"  runtime_version: "{_CUDA}"  compile_time_toolkit_version: "{_CUDA}"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9  minor: 10 }}
            runtime_version {{ major: 13 }}
            device_description_str: "{device_kind}"
        """


_AMPERE = GpuConfig(
    compute_capability=(8, 0),
    cores=108,
    fpus=64,
    shared_memory_bytes=164 * _KIB,
    shared_memory_per_block_bytes=163 * _KIB,
    clock_ghz=1.41,
)
_HOPPER = GpuConfig(
    compute_capability=(9, 0),
    cores=132,
    fpus=128,
    shared_memory_bytes=228 * _KIB,
    shared_memory_per_block_bytes=227 * _KIB,
    clock_ghz=1.98,
)
_BLACKWELL = GpuConfig(
    compute_capability=(10, 0),
    cores=148,
    fpus=128,
    shared_memory_bytes=228 * _KIB,
    shared_memory_per_block_bytes=227 * _KIB,
    clock_ghz=1.965,
)

GPU_CONFIGS: Final = {
    "a100-40gb": _AMPERE,
    "a100-80gb": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
}
"""Compiler parameters by the name of the chip's row."""
