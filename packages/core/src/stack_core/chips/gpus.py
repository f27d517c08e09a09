"""NVIDIA's data-center GPUs, with the numbers that NVIDIA publishes.

Data sheets headline the peaks of tensor cores with structured sparsity; the peaks here are dense, half of those. Data
sheets give NVLink's bandwidth in both directions; a row has one direction. Data sheets round memory sizes; the sizes
here are the totals that CUDA reports, from XLA's description of the GPU if there is one
(`xla/backends/gpu/target_config/specs`).

Tensor cores round float32 operands to TF32, which has 10 bits of mantissa and is JAX's default. `precision="highest"`
multiplies in true float32, outside of the tensor cores.
"""

import dataclasses

from stack_core.abi.chips import Chip

__all__ = [
    "A100_40GB",
    "A100_80GB",
    "A100_PCIE_40GB",
    "A100_PCIE_80GB",
    "B200",
    "H100",
    "H100_PCIE",
    "H200",
]

_MIB = 2**20


def _peaks(*, bfloat16: float, tf32: float, fp32: float, int8: float, **dtypes: float) -> dict[str, float]:
    half = {"bfloat16": bfloat16, "float16": bfloat16}
    return {**half, "float32": tf32, "float32/highest": fp32, "int8": int8, **dtypes}


A100_40GB = Chip(
    kind="a100-40gb",
    unit="device",
    peak_flops=_peaks(bfloat16=312e12, tf32=156e12, fp32=19.5e12, int8=624e12),
    hbm_bytes=42_331_013_120,
    hbm_bandwidth_bytes_s=1555e9,
    on_chip_bytes=40 * _MIB,
    link_bandwidth_bytes_s=600e9 / 2,
    provenance="NVIDIA A100 Tensor Core GPU data sheet, SXM; memory: XLA's a100_sxm_40.txtpb",
)

A100_80GB = dataclasses.replace(
    A100_40GB,
    kind="a100-80gb",
    hbm_bytes=85_100_068_864,
    hbm_bandwidth_bytes_s=2039e9,
    provenance="NVIDIA A100 Tensor Core GPU data sheet, SXM; memory: XLA's a100_sxm_80.txtpb",
)

# NVLink bridges connect cards only in pairs; the link between any two cards is PCIe 4.0 x16.
A100_PCIE_40GB = dataclasses.replace(
    A100_40GB,
    kind="a100-pcie-40gb",
    link_bandwidth_bytes_s=64e9 / 2,
    provenance="NVIDIA A100 40GB PCIe product brief, links without the bridge; memory: XLA's a100_sxm_40.txtpb",
)

A100_PCIE_80GB = dataclasses.replace(
    A100_80GB,
    kind="a100-pcie-80gb",
    hbm_bandwidth_bytes_s=1935e9,
    link_bandwidth_bytes_s=64e9 / 2,
    provenance="NVIDIA A100 Tensor Core GPU data sheet, PCIe, links without the bridge; memory: a100_sxm_80.txtpb",
)

_HOPPER_SXM = _peaks(
    bfloat16=989.4e12, tf32=494.7e12, fp32=66.9e12, int8=1978.9e12, float8_e4m3fn=1978.9e12, float8_e5m2=1978.9e12
)

H100 = Chip(
    kind="h100",
    unit="device",
    peak_flops=_HOPPER_SXM,
    hbm_bytes=84_942_979_072,
    hbm_bandwidth_bytes_s=3352e9,
    on_chip_bytes=50 * _MIB,
    link_bandwidth_bytes_s=900e9 / 2,
    provenance="NVIDIA H100 Tensor Core GPU Architecture white paper, H100 SXM5; memory: XLA's h100_sxm.txtpb",
)

H100_PCIE = Chip(
    kind="h100-pcie",
    unit="device",
    peak_flops=_peaks(
        bfloat16=756e12, tf32=378e12, fp32=51.2e12, int8=1513e12, float8_e4m3fn=1513e12, float8_e5m2=1513e12
    ),
    hbm_bytes=84_942_979_072,
    hbm_bandwidth_bytes_s=2039e9,
    on_chip_bytes=50 * _MIB,
    link_bandwidth_bytes_s=128e9 / 2,
    provenance=(
        "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 PCIe, links (PCIe 5.0 x16) without the bridge; "
        "memory: XLA's h100_pcie.txtpb"
    ),
)

H200 = dataclasses.replace(
    H100,
    kind="h200",
    hbm_bytes=int(139.8 * 2**30),
    hbm_bandwidth_bytes_s=4800e9,
    provenance="NVIDIA H200 Tensor Core GPU data sheet, SXM; peaks: H100 white paper; memory: what CUDA reports",
)

B200 = Chip(
    kind="b200",
    unit="device",
    peak_flops=_peaks(
        bfloat16=2250e12,
        tf32=1100e12,
        fp32=75e12,
        int8=4500e12,
        float8_e4m3fn=4500e12,
        float8_e5m2=4500e12,
        float4_e2m1fn=9000e12,
    ),
    hbm_bytes=191_514_411_008,
    hbm_bandwidth_bytes_s=7700e9,
    on_chip_bytes=132_644_864,
    link_bandwidth_bytes_s=1800e9 / 2,
    provenance="NVIDIA Blackwell data sheet, a GPU of HGX B200; memory and L2: XLA's b200.txtpb",
)
