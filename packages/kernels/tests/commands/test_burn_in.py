"""`stack bench burn-in`."""

import json
from pathlib import Path

import pytest

from stack_core import cli
from stack_core.abi.errors import BenchmarkError, UnknownName
from stack_kernels.commands.burn_in import burn_in


def test_what_it_cannot_begin_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="'nrom'"):
        burn_in(out=tmp_path / "new", ops="nrom")
    with pytest.raises(BenchmarkError, match="60 or more"):
        burn_in(out=tmp_path / "new", budget_s=1.0)
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match="not empty"):
        burn_in(out=tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_all_stages_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", "burn-in", "--ops", "norm", "--budget-s", "240", "--out", str(tmp_path / "out")])
    assert "checks failed: 0, not reached: 0." in capsys.readouterr().out
    (page,) = (tmp_path / "out").glob("*.md")
    text = page.read_text()
    assert "| `norm/reference` |" in text and "norm rms, residual" in text
    (table,) = (path for path in (tmp_path / "out").glob("cpu*.json") if "speeds" not in path.name)
    assert json.loads(table.read_text())
