"""A device without memory leaves its live arrays and programs in a capture that the commands and the page read."""

import gc
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stack_profile
from stack_core.abi.config import parse
from stack_core.abi.errors import HardwareError
from stack_core.abi.events import RunFailed
from stack_core.cli import main
from stack_profile.analyses.memory import memory
from stack_profile.analyses.out_of_memory import out_of_memory
from stack_profile.captures.observer import ProfileConfig, ProfileObserver
from stack_profile.exports import write
from stack_profile.report.page import page, sections
from stack_profile.traces.short_paths import short_paths
from stack_profile.traces.trace import load_trace, trace_of

COMMAND = "stack profile out_of_memory"
TOO_MANY = 1 << 45  # bytes; no address space of a process has as many


SHAPE = (500, 1000)


def held_arrays():
    return [jnp.asarray(np.ones(SHAPE, np.float32)) for _ in range(3)]


HELD = f"{__file__}:{held_arrays.__code__.co_firstlineno + 1}"


def fail():
    """Asks the device for too much while arrays are live."""
    gc.collect()
    for array in jax.live_arrays():  # of earlier failures, whose frames something may still hold
        if array.shape == SHAPE:
            array.delete()
    held = held_arrays()
    step = jax.jit(lambda x: jnp.tanh(x @ x.T))
    jax.block_until_ready(step(held[0]))
    jax.block_until_ready(jnp.zeros(TOO_MANY, jnp.int8))  # a program with less HLO than `step`
    assert held and step


def check(trace):
    answer = out_of_memory(trace)
    (row,) = (row for row in answer.rows if row.name == HELD)
    assert (row.kind, row.size_bytes, row.arrays) == ("array", 3 * 500 * 1000 * 4, 3), trace.live
    facts = answer.facts
    assert "RESOURCE_EXHAUSTED" in facts["message"] and facts["requested_bytes"] == TOO_MANY
    assert facts["live_bytes"] == sum(row.size_bytes for row in answer.rows)
    assert sum(row.size_bytes for row in out_of_memory(trace, by="device").rows) == facts["live_bytes"]


@pytest.mark.parametrize(
    ("message", "size_bytes"),
    [
        ("Out of memory allocating 35184372088832 bytes.", 35184372088832),
        ("Out of memory while trying to allocate 8.00GiB.", 8 << 30),
        ("Out of memory while trying to allocate 285212672 bytes.\nBufferAssignment stats: 9.64GiB", 285212672),
        ("Failed to allocate request for 256.00MiB (268435456B) on device ordinal 0", 256 << 20),
        (
            "Error allocating device buffer: Attempting to allocate 31.50M. That was not possible.",
            31.5 * (1 << 20),
        ),
        ("Attempting to reserve 6.50G at the bottom of memory. That was not possible.", 6.5 * (1 << 30)),
        ("XLA:TPU compile permanent error. Used 21.90G of 7.48G hbm.", None),
    ],
)
def test_the_messages_of_cpus_gpus_and_tpus_have_the_requested_bytes(message, size_bytes):
    failure = {"message": f"RESOURCE_EXHAUSTED: {message}", "devices": {}}
    trace = trace_of([], abouts=[{"out_of_memory": failure}])
    assert out_of_memory(trace).facts["requested_bytes"] == size_bytes


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The directory of a watched loop whose step failed."""
    folder = tmp_path_factory.mktemp("watched")
    watch = stack_profile.Watch(folder)
    with watch, pytest.raises(jax.errors.JaxRuntimeError), watch.step():
        fail()
    return folder


def test_a_running_capture_has_them_beside_its_events(tmp_path, capsys):
    with pytest.raises(jax.errors.JaxRuntimeError), stack_profile.capture(tmp_path) as captured:
        fail()
    captured.wait()
    trace = load_trace(tmp_path)
    check(trace)
    assert capsys.readouterr().err == f"stack: a device was out of memory: {COMMAND} {captured.path.parent}\n"
    assert trace.devices and memory(trace, program="jit__lambda").rows


def test_a_step_that_fails_without_a_capture_leaves_one(watched):
    trace = load_trace(watched)
    assert trace.source.split("/")[-2].startswith("out_of_memory_")
    check(trace)
    assert memory(trace).facts["total_bytes"] >= TOO_MANY, "of the program that failed"
    assert not trace.problems


def test_the_command_and_the_memory_view_of_the_page_open_it(browser, watched, tmp_path, capsys):
    main(["profile", "out_of_memory", str(watched), "--json"])
    answer = json.loads(capsys.readouterr().out)
    trace = load_trace(watched)
    assert answer == json.loads(json.dumps(out_of_memory(trace).as_mapping()))
    write([page(trace, list(sections(trace)))], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#tab=memory")
    expected = sorted((short_paths(trace).text(row.name) or "(none)", row.size_bytes) for row in memory(trace).rows)
    assert sorted((row["array"], row["size"]) for row in browser.rows()) == expected
    link = "document.querySelector('.panel .controls button.link').click()"
    assert "section=out_of_memory" in browser.changed(lambda: browser.evaluate(link))
    cells = "[each.cells[0].textContent, Number(each.cells[2].dataset.value)]"
    for place in (".panel .analysis tbody tr", "main #out_of_memory tbody tr"):
        found = browser.values(place, cells)
        assert found[0] == [short_paths(trace).text(answer["rows"][0]["name"]), answer["rows"][0]["size_bytes"]]
    assert browser.complaints == []


def run_that_fails(directory, error):
    observer = ProfileObserver(parse(ProfileConfig, {"steps": 0}), directory)
    observer.observe(RunFailed(error))
    observer.close()


def test_a_run_that_fails_for_it_leaves_one_in_its_directory(tmp_path, capsys):
    try:
        fail()
    except jax.errors.JaxRuntimeError as cause:
        error = HardwareError("The run does not fit the memory of a device.")
        error.__cause__ = cause
        run_that_fails(tmp_path / "full", error)
    trace = load_trace(tmp_path / "full")
    check(trace)
    assert f"{COMMAND} {Path(trace.source).parent}" in capsys.readouterr().err
    run_that_fails(tmp_path / "other", ValueError("a number"))
    assert not (tmp_path / "other").exists()


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "out").write_text("a file")
    watch = stack_profile.Watch(tmp_path / "out")
    with (
        pytest.warns(stack_profile.CaptureWarning, match="The state of the full memory is lost"),
        pytest.raises(jax.errors.JaxRuntimeError),
        watch.step(),
    ):
        fail()


def test_devices_that_cannot_be_described_cost_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "device_memory_profile", lambda: 1 / 0)
    with (
        pytest.warns(stack_profile.CaptureWarning, match="The state of the full memory is lost"),
        pytest.raises(jax.errors.JaxRuntimeError),
        stack_profile.capture(tmp_path, stacks_hz=0.0) as captured,
    ):
        fail()
    assert out_of_memory(load_trace(captured.wait())).rows == ()


SCRIPT = """
import sys, threading
import jax, jax.numpy as jnp
held = jnp.ones((500, 1000))

def work():
    jnp.zeros(1 << 45, jnp.int8).block_until_ready()

if sys.argv[1] == "thread":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_script_that_fails_for_it_leaves_one(tmp_path, where):
    (tmp_path / "script.py").write_text(SCRIPT)
    mode = [] if where == "main" else ["--listen"]  # as a server whose engine fails
    command = [sys.executable, "-m", "stack_core", "profile", "run", "--out", "out", *mode, "script.py", where]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert "RESOURCE_EXHAUSTED" in done.stderr and "contextlib" not in done.stderr
    assert done.returncode == (1 if where == "main" else 0)
    answer = out_of_memory(load_trace(tmp_path / "out"))
    assert answer.facts["requested_bytes"] == TOO_MANY
    assert done.stderr.count(f"{COMMAND} out/plugins/profile/") == 1
    assert any(row.name.endswith("script.py:4") and 2_000_000 <= row.size_bytes < 2_000_100 for row in answer.rows)


def test_a_damaged_file_is_named(watched, tmp_path):
    (file,) = watched.rglob("*.live.pb.gz")
    for name, damaged in (("cut", file.read_bytes()[:-9]), ("foreign", gzip.compress(b"\x0b"))):
        for each in file.parent.iterdir():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / each.name).write_bytes(damaged if each == file else each.read_bytes())
        trace = load_trace(tmp_path / name)
        assert trace.live == (None,) and any(file.name in problem for problem in trace.problems)
        assert "No data" not in out_of_memory(trace).notes[0]
