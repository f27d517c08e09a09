"""TPUs, with the numbers that Google publishes.

Each version's page of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs) gives the peaks of a chip, its HBM
and the bandwidth of its interconnect (ICI) in both directions; a row has half of that bandwidth. JAX's own table,
`jax/_src/tpu_info.py`, adds VMEM and the integer peaks that the pages have dropped.

The matrix unit multiplies bfloat16. By default, JAX rounds float32 operands to bfloat16 and gets the same rate;
`precision="highest"` takes six passes per product. Peaks of dtypes that the unit would have to convert are left out,
except fp8 on v5p and v6e, which is on their pages. The common memory (CMEM) of v4 is not VMEM and is not counted.
"""

from stack_core.abi.chips import Chip

__all__ = ["V4", "V5E", "V5P", "V6E", "V7X"]

_MIB = 2**20
_GIB = 2**30


def _peaks(*, bfloat16: float, **dtypes: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float32": bfloat16, "float32/highest": bfloat16 / 6, **dtypes}


V4 = Chip(
    kind="v4",
    unit="chip",
    peak_flops=_peaks(bfloat16=275e12, int8=275e12),
    hbm_bytes=32 * _GIB,
    hbm_bandwidth_bytes_s=1.2e12,
    on_chip_bytes=2 * 16 * _MIB,
    link_bandwidth_bytes_s=6 * 50e9,
    provenance=(
        "Cloud TPU documentation, TPU v4; links: Jouppi et al., TPU v4 (arXiv 2304.01433), table 4; "
        "VMEM of both cores: jax/_src/tpu_info.py"
    ),
)

V5E = Chip(
    kind="v5e",
    unit="chip",
    peak_flops=_peaks(bfloat16=197e12, int8=393e12, int4=788e12),
    hbm_bytes=16 * _GIB,
    hbm_bandwidth_bytes_s=819e9,
    on_chip_bytes=128 * _MIB,
    link_bandwidth_bytes_s=400e9 / 2,
    provenance="Cloud TPU documentation, TPU v5e; int4 and VMEM: jax/_src/tpu_info.py",
)

V5P = Chip(
    kind="v5p",
    unit="chip",
    peak_flops=_peaks(bfloat16=459e12, int8=918e12, int4=1.84e15, float8_e4m3fn=459e12, float8_e5m2=459e12),
    hbm_bytes=95 * _GIB,  # of 96 GiB: the page gives the part that libtpu leaves to programs
    hbm_bandwidth_bytes_s=2765e9,
    on_chip_bytes=2 * 64 * _MIB,
    link_bandwidth_bytes_s=1200e9 / 2,
    provenance="Cloud TPU documentation, TPU v5p; int8, int4 and VMEM of both cores: jax/_src/tpu_info.py",
)

V6E = Chip(
    kind="v6e",
    unit="chip",
    peak_flops=_peaks(bfloat16=918e12, int8=1836e12, int4=3.68e15, float8_e4m3fn=918e12, float8_e5m2=918e12),
    hbm_bytes=32 * _GIB,
    hbm_bandwidth_bytes_s=1638e9,
    on_chip_bytes=128 * _MIB,
    link_bandwidth_bytes_s=800e9 / 2,
    provenance="Cloud TPU documentation, TPU v6e and (fp8) TPU7x; int4 and VMEM: jax/_src/tpu_info.py",
)

# JAX sees each of the two dies as a device, so the row has half of a chip. The link between the dies is not counted.
V7X = Chip(
    kind="v7x",
    unit="core",
    peak_flops=_peaks(bfloat16=2307e12 / 2, float8_e4m3fn=4614e12 / 2, float8_e5m2=4614e12 / 2),
    hbm_bytes=192 * _GIB // 2,
    hbm_bandwidth_bytes_s=7380e9 / 2,
    on_chip_bytes=64 * _MIB,
    link_bandwidth_bytes_s=1200e9 / 2 / 2,
    provenance="Cloud TPU documentation, TPU7x (Ironwood), halved; VMEM of a core: jax/_src/tpu_info.py",
)
