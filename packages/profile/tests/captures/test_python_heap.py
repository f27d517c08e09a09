"""memray tracks the Python heap of a capture; its lines and sizes are those of the script."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import stack_profile
from stack_core.cli import main
from stack_profile.analyses.python_heap import python_heap
from stack_profile.captures.python_heap import crashes, load_memray
from stack_profile.captures.recording import Recording
from stack_profile.errors import CaptureError
from stack_profile.report.page import page, sections
from stack_profile.traces.trace import load_trace

SCRIPT = """
import threading, time
import jax, numpy as np

def table():
    return np.ones(3_000_000)  # 24 MB

def records():
    return [bytes(1000) for _ in range(10_000)]  # 10 MB

jax.devices()
while all(thread.name != "capture-stacks" for thread in threading.enumerate()):
    time.sleep(0.01)  # the capture starts memray, and then this thread
temporary = bytearray(20_000_000)
del temporary
kept = table(), records()
time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, memray):
    """The folder of a script and of its capture."""
    folder = tmp_path_factory.mktemp("heap")
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stack_core", "profile", "run", "--python-heap", "--out", "out", "script.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


def line_of(text):
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_the_peak_has_the_lines_of_the_script(tracked):
    trace = load_trace(tracked / "out")
    answer = python_heap(trace)
    sizes = {row.name.removeprefix(f"{tracked}/"): row for row in answer.rows}
    table, records = sizes[f"script.py:{line_of('np.ones')}"], sizes[f"script.py:{line_of('bytes(1000)')}"]
    assert table.size_bytes == pytest.approx(24_000_000, rel=0.01)
    assert records.size_bytes == pytest.approx(10_330_000, rel=0.03) and records.allocations >= 10_000
    assert f"script.py:{line_of('temporary =')}" not in sizes, "it was free at the peak"
    assert answer.facts["peak_bytes"] == sum(row.size_bytes for row in answer.rows) >= 34_000_000
    functions = {row.name: row.size_bytes for row in python_heap(trace, by="function").rows}
    assert functions["table"] == table.size_bytes
    assert not list((tracked / "out").rglob("*.bin"))


def test_the_command_and_the_page_have_the_same(tracked, capsys):
    main(["profile", "python_heap", str(tracked / "out"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    trace = load_trace(tracked / "out")
    assert answer == json.loads(json.dumps(python_heap(trace).as_mapping()))
    (section,) = (each for each in sections(trace) if each.name == "python_heap")
    assert f"script.py:{line_of('np.ones')}" in page(trace, [section])


def test_a_damaged_file_is_named(tracked, tmp_path):
    (file,) = (tracked / "out").rglob("*.heap.json.gz")
    for each in file.parent.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes()[: -9 if each == file else None])
    trace = load_trace(tmp_path)
    assert trace.heaps == (None,) and any(file.name in problem for problem in trace.problems)


def test_a_second_tracker_is_refused_and_the_profiler_is_free_again(tmp_path, memray):
    captured = stack_profile.capture(tmp_path / "out", python_heap=True)
    with memray.Tracker(tmp_path / "own.bin"), pytest.raises(CaptureError, match="cannot track the Python heap"):
        captured.start()
    with stack_profile.capture(tmp_path / "out", stacks_hz=0.0) as captured:
        pass
    assert captured.wait().exists()
    assert not list((tmp_path / "out").rglob("*.heap.bin"))


@pytest.mark.filterwarnings("ignore:The recording is lost")  # of the thread that writes
@pytest.mark.usefixtures("memray")
def test_a_capture_whose_recording_is_lost_leaves_no_file_of_memray(tmp_path, monkeypatch):
    def lose(recording):
        raise CaptureError("The recording is lost.")

    monkeypatch.setattr(Recording, "data", lose)
    with stack_profile.capture(tmp_path, stacks_hz=0.0, python_heap=True) as captured:
        pass
    with pytest.raises(CaptureError, match="The recording is lost"):
        captured.wait()
    assert not list(tmp_path.rglob("*.heap.bin"))


def test_a_memray_that_would_end_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "memray", SimpleNamespace(__version__="1.20.0"))
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    with pytest.raises(CaptureError, match=r"memray 1\.20\.0 crashes Python 3\.12"):
        stack_profile.capture(tmp_path, python_heap=True)
    assert crashes((3, 13), "1.20.0")
    assert not crashes((3, 12), "1.21.0rc1") and not crashes((3, 11), "1.20.0")


def test_without_memray_the_error_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "memray", None)
    with pytest.raises(CaptureError, match=r"profile\S*\[memray\]"):  # of this source, where it is installed from one
        load_memray()
    with pytest.raises(CaptureError, match=r"profile\S*\[memray\]"):
        stack_profile.capture(tmp_path, python_heap=True)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    with pytest.raises(SystemExit) as end:
        main(["profile", "run", "--python-heap", str(script)])
    assert end.value.code == 2 and "[memray]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["profile", "run", "--python-heap", "--listen", str(script)])
    assert "leave out --listen" in capsys.readouterr().err
