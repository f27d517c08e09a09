"""`stack chips`: every row with its source; only what is here is measured, and is marked."""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import pytest

from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.chips.gpus import H200
from stack_core.chips.tpus import V5P
from stack_core.commands.chips import chips


@dataclass(frozen=True)
class Device:
    device_kind: str


@pytest.fixture
def here(monkeypatch):
    """Puts rows and devices in the place of the real ones; returns which rows were measured."""
    measured = []

    def measure():
        measured.append("slow")
        return dataclasses.replace(V5P, kind="slow", on_chip_bytes=None)

    entries = {
        "slow": Entry("slow", measure, "core"),
        "v5p": Entry("v5p", V5P, "core", {"device_kinds": ("TPU v5",)}),
        "h200": Entry("h200", H200, "other", {"device_kinds": ("NVIDIA H200",)}),
    }
    monkeypatch.setitem(registries._by_kind, "chips", Registry("chips", lambda: (entries, {})))

    def devices(*kinds):
        monkeypatch.setattr(jax, "devices", lambda: [Device(kind) for kind in kinds])
        return measured

    return devices


def test_json_has_every_row_and_names_the_devices_that_are_here(here, capsys):
    measured = here("TPU v5", "TPU v5", "odd")
    chips(json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["devices"] == [
        {"kind": "TPU v5", "count": 2, "chip": "v5p"},
        {"kind": "odd", "count": 1, "chip": None},
    ]
    rows = {row["name"]: row for row in answer["chips"]}
    assert rows["h200"] == {
        "name": "h200",
        "plugin": "other",
        "device_kinds": ["NVIDIA H200"],
        "chip": json.loads(json.dumps(dataclasses.asdict(H200))),
    }
    assert rows["slow"]["chip"] is None
    assert measured == []


def test_a_row_that_has_to_be_measured_is_measured_where_it_is(here, capsys):
    measured = here("slow")
    chips(json=True)
    assert {row["name"]: row["chip"] for row in json.loads(capsys.readouterr().out)["chips"]}["slow"]["kind"] == "slow"
    assert measured == ["slow"]


def test_the_table_shows_peaks_and_memory_and_marks_what_is_here(here, capsys):
    here("TPU v5", "TPU v5", "odd")
    chips()
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines if ":" not in line and line.split()}
    assert cells["v5p"] == ["2", "chip", "459", "918", "459", "95", "2765", "128", "600"]
    assert cells["h200"] == ["device", "989", "1979", "1979", "140", "4800", "50", "450"]
    assert cells["slow"] == ["?"]
    assert "slow: measured on the machine itself." in lines
    assert any(line.startswith("1 x 'odd' of this machine has no chip row") for line in lines)


def test_every_peak_and_its_source_is_told_in_one_line(here, capsys):
    here()
    chips()
    lines = capsys.readouterr().out.splitlines()
    peaks = (
        "bfloat16 989, float16 989, float32 495, float32/highest 66.9, int8 1979, float8_e4m3fn 1979, float8_e5m2 1979"
    )
    assert f"h200: {peaks}. {H200.provenance}." in lines


def test_a_number_that_is_not_known_is_a_dash(here, capsys):
    here("slow")
    chips()
    (slow,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("slow ")]
    assert slow[-2:] == ["-", "600"]


def test_rows_are_listed_where_jax_does_not_start():
    done = subprocess.run(
        [sys.executable, "-m", "stack_core", "chips", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
    )
    answer = json.loads(done.stdout)
    assert answer["devices"] == []
    assert {"cpu", "v4", "v7x", "a100-80gb", "h100", "h200", "b200"} <= {row["name"] for row in answer["chips"]}
    assert "'nonsense'" in done.stderr
    assert "`stack doctor`" in done.stderr
