"""Kernels are compiled for one chip a process; one that ends its process costs no other."""

import sys
import textwrap
from pathlib import Path

import pytest

from stack_kernels.laboratory import experiments
from stack_kernels.laboratory.experiments import Row, compile_for

PLUGIN = """
    import os

    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    from stack_core import hookimpl
    from stack_kernels import implementation

    STACK_ABI_MINOR = 0


    def doubled(x):
        def kernel(x, y):
            y[...] = x[...] * 2

        tile = pl.BlockSpec((8, 128), lambda row: (row, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, grid=x.shape[0] // 8, in_specs=[tile], out_specs=tile, out_shape=shape, name="doubled"
        )(x)


    def of_each_row(x):
        return doubled(x.reshape(-1, x.shape[-1])[:, :128])[:, :1].reshape(*x.shape[:-1], 1) + x


    @implementation("rope", name="kernel")
    def in_a_kernel(x, positions, **options):
        return of_each_row(x)


    @implementation("rope", name="falls_back")
    def falls_back(x, positions, **options):
        return x * 2


    @implementation("rope", name="ends")
    def ends(x, positions, **options):
        os._exit(6)


    @implementation("rope", name="refuses", supports=lambda call, chip, config: f"no {chip.kind}")
    def refuses(x, positions, **options):
        return x


    @hookimpl
    def stack_register_ops(registry):
        for each in (in_a_kernel, falls_back, ends, refuses):
            registry.add(f"rope/{each.name}", each)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that the processes of the laboratory find."""
    (tmp_path / "lab_plugin.py").write_text(textwrap.dedent(PLUGIN))
    metadata = tmp_path / "lab_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stack.plugins.v1]\nlab-plugin = lab_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def check_rows(chip: str, kernel: str) -> None:
    told: list[Row] = []
    names = [f"rope/{name}" for name in ("ends", "kernel", "falls_back", "refuses")]
    rows = compile_for(chip, names, on_row=told.append)
    assert told == rows
    by_name = {row.name: row for row in rows if row.direction == "forward"}
    assert {name: row.status for name, row in by_name.items()} == {
        "rope/ends": "failed",
        "rope/kernel": "compiled",
        "rope/falls_back": "failed",
        "rope/refuses": "refused",
    }
    assert "ended with status 6" in str(by_name["rope/ends"].reason)
    assert "calls no kernel" in str(by_name["rope/falls_back"].reason)
    assert by_name["rope/refuses"].reason == f"no {chip}"
    compiled = by_name["rope/kernel"]
    assert any(kernel in name for name in compiled.kernels)
    assert (compiled.compile_s or 0) > 0
    assert compiled.temporary_bytes is not None
    is_tpu = chip.startswith("v")
    assert (compiled.vector_memory_bytes or 0) >= 2 * 8 * 128 * 2 if is_tpu else (compiled.registers or 0) > 8
    assert (compiled.registers is None) == is_tpu
    assert (compiled.spilled_bytes is None) == is_tpu


@pytest.mark.tpu_aot
@pytest.mark.usefixtures("plugin")
def test_kernels_for_a_tpu() -> None:
    check_rows("v6e", "doubled")


@pytest.mark.gpu_aot
@pytest.mark.usefixtures("plugin")
def test_kernels_for_a_gpu() -> None:
    check_rows("h100", "mosaic_gpu")


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeps = tmp_path / "sleeps"
    sleeps.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(experiments.sys, "executable", str(sleeps))
    (row,) = compile_for("v6e", ["rope/reference"], timeout_s=0.2)
    assert (row.name, row.status) == ("rope/reference", "failed")
    assert "ended with status -9" in str(row.reason)
