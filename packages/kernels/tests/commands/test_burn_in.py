"""`stack bench burn-in`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError, UnknownName
from stack_kernels.commands.burn_in import burn_in

COMMAND = [sys.executable, "-m", "stack_core", "bench", "burn-in", "--ops", "norm", "--minutes", "4", "--out"]


def test_what_it_cannot_begin_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="'nrom'"):
        burn_in(out=tmp_path / "new", ops="nrom")
    for minutes in (0.5, float("nan"), float("inf")):
        with pytest.raises(BenchmarkError, match="expected 1 or more"):
            burn_in(out=tmp_path / "new", minutes=minutes)
    with pytest.raises(BenchmarkError, match="add --dry-run"):
        burn_in(out=tmp_path / "new", chip="h100")
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match="holds no burn-in to continue"):
        burn_in(out=tmp_path)
    with pytest.raises(BenchmarkError, match="is a file"):
        burn_in(out=tmp_path / "file")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_killed_burn_in_continues_and_its_page_is_whole(tmp_path: Path) -> None:
    """Kills the command with its first checks done, and another one while it tunes; a third finishes."""
    for marker in ("20/", "tuning, "):
        with subprocess.Popen([*COMMAND, str(tmp_path)], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if marker in line:
                    os.kill(process.pid, signal.SIGKILL)
    time.sleep(1.0)
    ended = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "failed: 0; not reached: 0." in ended.stdout
    assert "checks in" not in ended.stderr, "the killed runs had made all checks"
    (page,) = tmp_path.glob("*.md")
    text = page.read_text()
    assert "| `norm/reference` | passed |" in text and "norm rms, residual" in text
    assert "- profile: none" not in text and "Not reached" not in text
    (table,) = (path for path in tmp_path.glob("cpu*.json") if "speeds" not in path.name)
    assert json.loads(table.read_text())
