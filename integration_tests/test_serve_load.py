"""The commands of stack-serve against each other: load that hangs up, a measurement, a conversation."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "serve_load.py"


def test_a_loaded_server_loses_nothing_and_leaks_nothing(tmp_path):
    """The benchmark checks every answer; this is a short run of it."""
    sizes = ("--known", "4", "--minutes", "0.05", "--streams", "16", "--max-sequences", "8", "--pages", "64")
    command = [sys.executable, BENCHMARK, *sizes, "--results", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "serve_load.json").read_text())
    assert record["failures"] == []
    assert set(record["outcomes"]) == {"completed", "hung up"}
    assert record["preemptions"] > 0  # pages ran out, and nobody noticed
