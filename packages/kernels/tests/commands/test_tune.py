"""`stack tune`: a function of a file is measured; tables are listed, exported and merged."""

import json
from pathlib import Path

import pytest

from stack_core.abi.errors import TuningError
from stack_core.cli import main
from stack_kernels.commands.tune import tune
from stack_kernels.tuning.child import TRYING_VARIABLE, tune_in_child
from stack_kernels.tuning.sources import MEASURED
from stack_kernels.tuning.tables import ChipName, Table

MODULE = """
import jax, jax.numpy as jnp
from stack_core import ops
from beside import WIDTH

def layer(x, weight):
    return ops.linear(x, weight)

def example_args():
    return jax.ShapeDtypeStruct((4, WIDTH), "float32"), jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a function in a directory of its own; what `tune` measures it measures in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STACK_TUNED_TABLES")
    monkeypatch.setenv(TRYING_VARIABLE, str(tmp_path / "trying.json"))
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    MEASURED.forget()
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    (tmp_path / "model.py").write_text(MODULE)
    return tmp_path / "model.py"


def test_a_function_of_a_file_is_tuned(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["tune", f"{module}:layer", "--json", "--budget-s", "30", "--tables", "tables"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    (call,) = report["calls"]
    assert (call["op"], call["direction"], call["sizes"]) == ("linear", "forward", {"d_in": 8, "d_out": 8, "rows": 4})
    assert call["sources"] == [f"{module}:7"]
    assert {"0/1  linear forward d_in=8 d_out=8 rows=4", "1/1  done"} <= set(captured.err.splitlines())
    assert Path(report["path"]).parent == Path("tables")
    assert report["others_cpus"] is None or report["others_cpus"] >= 0


def test_a_person_is_told_what_changed(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(f"{module}:layer", budget_s=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 x linear forward d_in=8 d_out=8 rows=4: ")
    assert sum(" s -> " in line for line in lines) == 1


def test_tables_are_exported_merged_listed_and_cleared(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = module.parent
    one, three = folder / "one", folder / "three"
    tune(f"{module}:layer", budget_s=30.0, tables=one)
    tune(tables=one, export=folder / "two.json")
    table = Table.read(folder / "two.json")
    tune(merge=[folder / "two.json"], tables=three)
    tune(tables=one, export=folder)
    assert Table.read(three / table.chip.file_name) == Table.read(folder / table.chip.file_name) == table
    assert "xla_cpu" in {found.implementation for found in table.measurements}
    tune(merge=[folder / "two.json"])
    own = folder / ".stack" / "tuned"
    (own / "damaged.json").write_text("{")
    capsys.readouterr()
    tune(json=True)
    records = {Path(record["path"]).name: record for record in json.loads(capsys.readouterr().out)}
    assert records[table.chip.file_name]["measurements"] == len(table.measurements)
    assert "is damaged" in records["damaged.json"]["error"]
    tune()
    assert f"{table.chip}: " in capsys.readouterr().out
    tune(clear=True)
    assert [file.name for file in own.iterdir()] == ["damaged.json"]  # whose it is nobody can say
    assert f"deleted {Path('.stack', 'tuned', table.chip.file_name)}" in capsys.readouterr().err


@pytest.mark.parametrize("named", [True, False])
def test_tables_are_listed_and_cleared_where_results_go(
    module: Path, named: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, own = module.parent / "one", module.parent / ".stack" / "tuned"
    if named:
        monkeypatch.setenv("STACK_TUNED_TABLES", str(folder))
    for place in (folder, own):
        Table(ChipName("cpu", "", {})).write(place / "cpu.json")
    with pytest.raises(TuningError, match="cannot be read"):
        tune(clear=True, merge=[folder / "none.json"], tables=None if named else folder)
    tune(clear=True, tables=None if named else folder, json=True)
    assert json.loads(capsys.readouterr().out) == []
    assert (list(folder.iterdir()), [file.name for file in own.iterdir()]) == ([], ["cpu.json"])


def test_there_is_nothing_to_export_before_anything_was_measured(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_TUNED_TABLES", "")
    with pytest.raises(TuningError, match="Nothing was measured on"):
        tune(export=module.parent / "table.json")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (None, {"again": True}, "--again is for measurements"),
        (None, {"budget_s": 5.0}, "--budget-s is for measurements"),
        ("layer.py:layer", {"budget_s": -1.0}, "--budget-s is -1"),
    ],
)
def test_options_without_effect_are_refused(target: str | None, options: dict, message: str) -> None:
    with pytest.raises(TuningError, match=message):
        tune(target, **options)


INTERRUPTED = """
from stack_core.abi.ops import OpImplementation

traced = []

def forward(x, weight, *, bias, preferred_dtype, requested):
    traced.append(1)
    if len(traced) == 2:  # not when the function is traced, but when its implementation is tried
        raise KeyboardInterrupt
    return x @ weight, {}

MINE = OpImplementation("linear", "mine", forward)

def stopped(x, weight):
    return ops.linear(x, weight, implementation=MINE)
"""


def test_ctrl_c_prints_what_there_is_and_exits_with_130(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (module.parent / "stopped.py").write_text(MODULE + INTERRUPTED)
    with pytest.raises(SystemExit) as stopped:
        main(["tune", f"{module.parent / 'stopped.py'}:stopped"])
    assert stopped.value.code == 130
    assert "(interrupted)" in capsys.readouterr().out


CRASHING = """
import os, signal
import jax.numpy as jnp
from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.ops import OpImplementation

def forward(x, weight, *, bias, preferred_dtype, requested):
    if os.environ.get("{variable}") and os.path.exists(os.environ["{variable}"]):  # tried, not traced
        {end}
    return x @ weight, {{}}

CRASHES = OpImplementation("linear", "crashes", forward)

def crashing(x, weight):
    return ops.linear(x, weight, implementation=CRASHES)
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV ended the process"),
        pytest.param("import time; time.sleep(600)", "the time limit ended the process", marks=pytest.mark.slow),
    ],
)
def test_an_implementation_that_ends_the_process_is_recorded_and_left_out(
    module: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], end: str, told: str
) -> None:
    monkeypatch.delenv(TRYING_VARIABLE)
    source = MODULE + CRASHING.format(variable=TRYING_VARIABLE, end=end)
    (module.parent / "crashing.py").write_text(source)
    arguments = ["crashing.py:crashing", "--tables", "tables"]
    said: list[str] = []
    limits = {"budget_s": 60.0, "grace_s": 5.0 if "sleep" in end else 60.0}
    assert tune_in_child(arguments, folder=Path("tables"), say=said.append, **limits) == 0
    assert said == [f"crashes: {told}; going on without it"]
    (file,) = Path("tables").iterdir()
    outcomes = {found.implementation: (found.outcome, found.reason) for found in Table.read(file).measurements}
    assert outcomes["crashes"] == ("failed", told)
    assert outcomes["reference"][0] == "measured"
    assert " s -> " in capfd.readouterr().out
