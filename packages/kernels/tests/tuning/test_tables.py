"""Tables keep what was measured through files and merges; a file that cannot be read costs only itself."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from stack_core import ops
from stack_core.abi.errors import TuningError
from stack_kernels.tuning import sources
from stack_kernels.tuning.shapes import CallShape
from stack_kernels.tuning.sources import MEASURED, DamagedTableWarning, known_tables, table_files, tuned
from stack_kernels.tuning.tables import (
    Case,
    ChipName,
    Measurement,
    Table,
    decoded_config,
    encoded_config,
    local_table_path,
)

from .conftest import linear

CHIP = ChipName("cpu", "Acme 9000 (R), 2 cores", {"float32": 2e11, "memory": 2e10})
SHAPE = CallShape("linear", (("weight", "float32"), ("x", "float32")), (("d_in", 16), ("rows", 24)), 6144, 4096)
CASE = Case(SHAPE, "backward", ("x", "weight"))
ONE = Measurement(
    case=CASE,
    implementation="xla_cpu",
    config={"rows": 64, "fused": True},
    outcome="measured",
    median_s=1e-3,
    spread=0.05,
    cpu_s=2e-3,
    rounds=15,
    whole=True,
    versions={"jax": "0.12.0.1", "stack-kernels": "0.1.0"},
    date="2026-11-21T10:00:00+00:00",
)
WRONG = dataclasses.replace(ONE, config=None, outcome="rejected", reason="off by 2", median_s=0.0, rounds=0)


def test_a_file_holds_all_of_a_table(tmp_path: Path) -> None:
    table = Table(CHIP, (ONE, WRONG, dataclasses.replace(ONE, case=Case(SHAPE, "forward"), whole=False)))
    table.write(tmp_path / "new" / "table.json")
    assert Table.read(tmp_path / "new" / "table.json") == table
    assert Table.read(tmp_path / "new" / "table.json").chip.rates == CHIP.rates
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "table.json"]


def test_of_the_same_thing_the_newer_wins_then_the_one_of_more_rounds() -> None:
    newer = dataclasses.replace(ONE, median_s=2e-3, rounds=3, date="2026-11-22T10:00:00+00:00")
    longer = dataclasses.replace(ONE, median_s=3e-3, rounds=16)
    for other, winner in ((newer, newer), (longer, longer), (dataclasses.replace(ONE, rounds=1), ONE)):
        assert Table(CHIP, (ONE,)).merge(Table(CHIP, (other,))).measurements == (winner,)
        assert Table(CHIP, (other,)).merge(Table(CHIP, (ONE,))).measurements == (winner,)


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "other"},
        {"config": {"rows": 128, "fused": True}},
        {"case": Case(SHAPE, "forward")},
        {"case": Case(SHAPE, "backward", ("x",))},
        {"case": Case(dataclasses.replace(SHAPE, sizes=(("d_in", 16), ("rows", 48))), "backward", ("x", "weight"))},
        {"versions": {"jax": "0.11.2"}},
    ],
    ids=["implementation", "config", "direction", "gradients", "sizes", "jax"],
)
def test_different_things_are_all_kept(change: Any) -> None:
    other = dataclasses.replace(ONE, **change)
    assert Table(CHIP, (ONE,)).merge([other]).measurements == (ONE, other)


def test_a_later_release_of_one_minor_version_of_jax_replaces() -> None:
    later = dataclasses.replace(ONE, versions={"jax": "0.12.3"}, date="2026-11-23T10:00:00+00:00")
    assert Table(CHIP, (ONE,)).merge([later]).measurements == (later,)


def test_tables_of_two_chips_are_not_mixed() -> None:
    other = dataclasses.replace(CHIP, model="Acme 9000 (R), 4 cores")
    with pytest.raises(
        TuningError, match=r"table of cpu \(Acme 9000 \(R\), 4 cores\) cannot be merged into .* 2 cores"
    ):
        Table(CHIP).merge(Table(other))


DAMAGED = [
    ("", "is damaged: Expecting value"),
    ('{"format": "stack tuned table 1"', "is damaged"),
    ("[]", "is of format None; this stack-kernels reads 'stack tuned table 1'"),
    ('{"format": "stack tuned table 2", "chip": {}}', "is of format 'stack tuned table 2'"),
    ('{"format": "stack tuned table 1"}', "is damaged: ValueError: its fields are"),
]


@pytest.mark.parametrize(("content", "expected"), DAMAGED)
def test_what_is_no_table_is_an_error_that_names_the_file(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(TuningError, match=expected) as caught:
        Table.read(tmp_path / "t.json")
    assert "t.json" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("chip",), {"kind": "cpu"}),
        (("chip",), None),
        (("cases",), [3]),
        (("cases", 0, "sizes"), 8),
        (("cases", 0, "measurements", 0, "outcome"), "fast"),
        (("cases", 0, "measurements", 0, "median_s"), -1.0),
        (("cases", 0, "measurements", 0, "colour"), "red"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_an_error(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    Table(CHIP, (ONE,)).write(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(TuningError, match="is damaged"):
        Table.read(tmp_path / "t.json")


def test_what_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="cannot be read"):
        Table.read(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TuningError, match="cannot be written"):
        Table(CHIP).write(tmp_path / "file" / "t.json")


def test_a_table_is_named_after_the_chip_and_lies_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_table_path(CHIP) == tmp_path / "stack" / "tuned" / "cpu-acme-9000-r-2-cores.json"
    assert local_table_path(CHIP, Path("there")) == Path("there") / CHIP.file_name
    monkeypatch.setenv("STACK_TUNED_TABLES", os.pathsep.join(["one.json", "folder"]))
    assert local_table_path(CHIP).parent == Path("folder")
    for unnamed in ("", "one.json"):
        monkeypatch.setenv("STACK_TUNED_TABLES", unnamed)
        assert local_table_path(CHIP).parent == Path(".stack", "tuned")
    assert ChipName("h200", "").file_name == "h200.json"


@pytest.mark.parametrize("config", [None, 64, "wide", True, ONE])
def test_configs_survive_json(config: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Tile:
        rows: int = 64
        name: str = "wide"

    config = Tile(128) if config is ONE else config
    value = json.loads(json.dumps(encoded_config(config)))
    assert decoded_config(value, config) == config


def test_known_tables_are_merged_by_chip(tmp_path: Path) -> None:
    folder = tmp_path / "stack" / "tuned"
    Table(CHIP, (ONE,)).write(folder / "a.json")
    Table(CHIP, (WRONG,)).write(folder / "b.json")
    Table(ChipName("h200", ""), (ONE,)).write(folder / "c.json")
    known = known_tables()
    assert {str(name): len(table.measurements) for name, table in known.items()} == {str(CHIP): 2, "h200": 1}


def test_the_variable_names_files_and_folders_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Table(CHIP, (ONE,)).write(tmp_path / "folder" / "a.json")
    Table(CHIP, (ONE,)).write(tmp_path / "b.json")
    monkeypatch.setenv("STACK_TUNED_TABLES", os.pathsep.join([str(tmp_path / "folder"), str(tmp_path / "b.json")]))
    assert [file.name for file in table_files()] == ["a.json", "b.json"]
    monkeypatch.setenv("STACK_TUNED_TABLES", "")
    assert table_files() == []


def test_tables_of_a_directory_are_read_there_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STACK_TUNED_TABLES")
    monkeypatch.chdir(tmp_path)
    Table(CHIP, (ONE,)).write(local_table_path(CHIP))
    assert table_files()[-1] == local_table_path(CHIP)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert local_table_path(CHIP) not in table_files()


def test_a_damaged_table_is_reported_and_ops_are_chosen_without_it(
    register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(linear("mine", priority=3))
    (tmp_path / "stack" / "tuned" / "damaged.json").write_text("{")
    struct = jax.ShapeDtypeStruct((16, 16), "float32")
    with pytest.warns(DamagedTableWarning, match=r"damaged.json' is damaged: .* Ops are chosen without it") as caught:
        (call,) = ops.explain(ops.linear, struct, struct)
    assert call.forward.implementation.name == "mine"
    assert len(caught) == 1
    ops.explain(lambda x: ops.linear(x, x), struct)  # warnings are errors
    monkeypatch.setenv("STACK_TUNED_TABLES", str(tmp_path / "absent.json"))
    MEASURED.forget()
    with pytest.warns(DamagedTableWarning, match="absent.json"):
        ops.explain(ops.linear, struct, struct)


def test_a_table_that_a_user_names_must_be_readable(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="absent"):
        tuned(tmp_path / "absent.json")


def test_what_is_measured_here_goes_before_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.delenv("STACK_TUNED_TABLES")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_SHIPPED", shipped)
    Table(CHIP, (ONE,)).write(shipped / CHIP.file_name)
    (known,) = known_tables().values()
    assert known.measurements == (ONE,)
    here = dataclasses.replace(ONE, median_s=2e-3)
    Table(CHIP, (here,)).write(local_table_path(CHIP))
    (known,) = known_tables().values()
    assert known.measurements == (here,)
