"""What other programs compute meanwhile is told, and what this one computes is not among it."""

import os
import time

import pytest

from stack_kernels.tuning import neighbours
from stack_kernels.tuning.neighbours import Neighbours


def test_others_are_counted_and_this_process_is_not(monkeypatch, tmp_path):
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(neighbours, "_STAT", stat)
    stat.write_text(f"cpu  {1000 * ticks} 0 0 5 5 0 0 0 0 0\ncpu0 1 1\n")
    since_s, counted = time.monotonic(), Neighbours()
    sum(range(2_000_000))  # which the file of the test leaves out
    assert counted.cpus() == 0
    stat.write_text(f"cpu  {1100 * ticks} 0 {100 * ticks} 5 5 0 0 0 0 0\ncpu0 1 1\n")
    cpus = counted.cpus()
    assert cpus == pytest.approx(200 / (time.monotonic() - since_s), rel=0.2)


def test_it_is_unknown_where_there_is_no_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(neighbours, "_STAT", tmp_path / "stat")
    assert Neighbours().cpus() is None
