"""The committed table of what runs where is that of the code: `stack bench compile --table docs/accelerators.json`."""

import dataclasses
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_core.abi.plugins import registries
from stack_kernels.from_tokamax import missing
from stack_kernels.jit_cpu import host
from stack_kernels.laboratory.experiments import Row, compile_for
from stack_kernels.laboratory.interpreted import INTERPRETABLE
from stack_kernels.laboratory.table import (
    CHIPS,
    COLUMNS,
    Cell,
    Table,
    cell_of,
    count_supported,
    implementations,
    is_of_tokamax,
)

ROOT = Path(__file__).parents[4]
PATH = ROOT / "docs/accelerators.json"
TABLE = Table.read(PATH)
AGAIN = "run: stack bench compile --table docs/accelerators.json"


def test_it_has_a_cell_for_each_implementation_and_chip() -> None:
    assert sorted(TABLE.cells) == implementations(), AGAIN
    assert all(set(row) == set(COLUMNS) for row in TABLE.cells.values())
    allowed = {"cpu": {"ran", "interpreted", "refused"}, **{chip: {"compiled", "refused"} for chip in CHIPS}}
    for name, row in TABLE.cells.items():
        for column, cell in row.items():
            assert cell.status in allowed[column], f"{name} on {column}; {AGAIN}"
            assert (cell.reason is None) == (cell.status != "refused")


@pytest.mark.parametrize("column", COLUMNS)
def test_what_an_implementation_takes_is_what_the_table_says(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is skipped where it ran, was interpreted or compiled once, shows here."""
    if column == "cpu":
        if (here := host.this_processor()) is None:
            pytest.skip("needs Linux on x86-64 with AVX2, as the table's processor")
        monkeypatch.setattr(host, "this_processor", lambda: _of_table(here))
    for name, row in TABLE.cells.items():
        interpreted = row[column].status == "interpreted"
        assert not interpreted or name in INTERPRETABLE
        assert count_supported(name, "v6e" if interpreted else column)[0] == row[column].cases, (
            f"{name} on {column}; {AGAIN}"
        )


def _of_table(here: host.Processor) -> host.Processor:
    """Returns this processor with the table's instructions, by which `supports` decides."""
    recorded = set(TABLE.processor["features"])
    return dataclasses.replace(
        here,
        lanes=16 if "avx512f" in recorded else 8,
        has_bf16_dot="avx512_bf16" in recorded,
        has_int8_dot="avx512_vnni" in recorded,
        has_tiles="amx_bf16" in recorded,
    )


def test_every_implementation_that_ran_or_was_interpreted_has_a_suite() -> None:
    tests = {path: path.read_text() for path in ROOT.glob("packages/*/tests/**/*.py")}
    for name, row in TABLE.cells.items():
        op, _, implementation = name.partition("/")
        if row["cpu"].status != "refused":
            own = [text for path, text in tests.items() if _is_of(path, op, implementation)]
            assert any("op_checks(" in text and f'"{op}"' in text for text in own), (
                f"{name} has no suite of its contract"
            )


def _is_of(path: Path, op: str, implementation: str) -> bool:
    if implementation == "reference":
        return path.name in ("test_contracts.py", f"test_{op}.py") and "core" in path.parts
    return path.parent.name == op and path.name == f"test_{implementation}.py"


def test_the_page_shows_the_table() -> None:
    text = PATH.with_suffix(".md").read_text()
    assert TABLE.on_page(text) == text, AGAIN


def test_a_cell_says_what_came_of_it() -> None:
    splash = Row("attention/splash", "v6e", "causal", "forward", "compiled")
    assert cell_of("attention/splash", "v6e", [splash]).status == "compiled"
    assert cell_of("attention/splash", "h100", []) == Cell("refused", 0, "it is for tpu, and the target is gpu")
    assert cell_of("attention/splash", "cpu", []).status == "interpreted"
    failed = Row("attention/splash", "v6e", "causal", "gradient", "failed", "no memory")
    with pytest.raises(BenchmarkError, match=r"does not compile for v6e.*\n.*gradient: no memory"):
        cell_of("attention/splash", "v6e", [splash, failed])


def check_compiles(chip: str) -> None:
    """All but references, which `test_targets.py` compiles in this process."""
    names = [
        name
        for name, row in TABLE.cells.items()
        if row[chip].status == "compiled"
        and not name.endswith("/reference")
        and (missing() is None or not is_of_tokamax(name))
    ]
    rows = compile_for(chip, names)
    assert {row.name for row in rows if row.status == "compiled"} == set(names)
    assert [row for row in rows if row.status == "failed"] == []
    assert all(row.kernels for row in rows if row.status == "compiled" and registries.ops[row.name].is_opaque)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.startswith("v")])
def test_what_is_said_to_compile_for_a_tpu_does(chip: str) -> None:
    check_compiles(chip)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if not chip.startswith("v")])
def test_what_is_said_to_compile_for_a_gpu_does(chip: str) -> None:
    check_compiles(chip)
