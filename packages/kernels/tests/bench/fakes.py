"""Rows with times that a test decides."""

from stack_kernels.bench.results import Results, Row

VERSIONS = {"jax": "0.12.0", "stack-kernels": "0.1.0"}


def row(ratios, case="rms", reference_s=1e-3, **others):
    count = len(ratios)
    fields = {
        "op": "norm",
        "model": "66m",
        "dtype": "float32",
        "direction": "forward",
        "asked": "",
        "ran": "xla_cpu",
        "flops": 0,
        "traffic_bytes": 8192,
        "bound_s": 1e-4,
        "denominator": "28 GB/s",
    }
    wall_s = tuple(reference_s * ratio for ratio in ratios)
    steady = (reference_s,) * count
    return Row(
        **{**fields, "case": case, **others},
        wall_s=wall_s,
        cpu_s=wall_s,
        reference_wall_s=steady,
        reference_cpu_s=steady,
    )


def results(*rows, **others):
    fields = {"date": "2026-01-02T03:04:05+00:00", "chip": "cpu", "model": "toy, 2 cores", "provenance": "measured"}
    return Results(**{**fields, "versions": VERSIONS, **others}, rows=rows)
