"""`stack profile`: every analysis in every form, and captures of scripts that know nothing of it."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack_core.cli import main
from stack_profile.traces.trace import load_trace

ANALYSES = ("overview", "ops", "roofline", "memory", "compile")

SCRIPT = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
assert len(jax.devices()) == 2, "the backend was started before the script could configure it"
print([__name__, *sys.argv])
step = jax.jit(lambda x: jnp.tanh(x @ x))
x = jnp.ones((128, 128))
for _ in range(20):
    x = step(x)
sys.exit(int(sys.argv[-1]))
"""


def printed(capsys, *tokens):
    main(["profile", *map(str, tokens)])
    return capsys.readouterr().out


def refused(capsys, *tokens):
    with pytest.raises(SystemExit) as end:
        main(["profile", *map(str, tokens)])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("analysis", ANALYSES)
def test_an_analysis_reads_alike_as_table_json_and_spreadsheet(capsys, captured, analysis):
    answer = json.loads(printed(capsys, analysis, captured, "--json"))
    rows = list(csv.DictReader(io.StringIO(printed(capsys, analysis, captured, "--csv"))))
    assert len(rows) == len(answer["rows"]) > 0
    assert list(rows[0]) == list(answer["rows"][0])
    table = printed(capsys, analysis, captured, "--limit", 1)
    assert all(f"note: {note}" in table for note in answer["notes"])
    assert ("more rows" in table) == (len(rows) > 1)


@pytest.mark.parametrize(
    "tokens",
    [("ops", "--by", "layer"), ("ops", "--by", "line", "--within", "."), ("memory", "--by", "schedule"),
     ("memory", "--by", "line", "--program", "jit_step"), ("roofline", "--chip", "h100"),
     ("overview", "--device", "CPU:0")],
    ids=" ".join,
)  # fmt: skip
def test_options_reach_their_analysis(capsys, captured, tokens):
    name, *options = tokens
    assert json.loads(printed(capsys, name, captured, *options, "--json"))["rows"]


def test_mistakes_are_named(capsys, captured, tmp_path):
    assert "does not exist" in refused(capsys, "ops", tmp_path / "nothing")
    assert "holds no *.xplane.pb" in refused(capsys, "ops", tmp_path)
    assert "two formats" in refused(capsys, "ops", captured, "--json", "--csv")
    assert "Must be >= 0" in refused(capsys, "ops", captured, "--limit", -1)
    assert "'h10'" in refused(capsys, "roofline", captured, "--chip", "h10")
    assert "no program 'jit_x'" in refused(capsys, "memory", captured, "--program", "jit_x")
    assert "no script" in refused(capsys, "run", "missing.py")
    for tokens, message in ((("run",), "Name a script to capture: "), (("run", "--hz", "a"), "arguments: --hz: ")):
        said = refused(capsys, *tokens)
        assert said.startswith("stack: error: ") and message in said and said.count("\n") == 1
    target = tmp_path / "missing" / "out.json"
    assert "cannot be written" in refused(capsys, "export", captured, "--to", "csv", "--output", target)


def test_the_directory_of_a_trace_is_never_written_to(capsys, captured):
    before = {path: path.stat().st_mtime_ns for path in Path(captured).rglob("*")}
    for analysis in ANALYSES:
        printed(capsys, analysis, captured)
    assert {path: path.stat().st_mtime_ns for path in Path(captured).rglob("*")} == before


def run(tmp_path, *tokens, script=SCRIPT):
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "stack_core", "profile", "run", *map(str, tokens)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)


def test_a_script_is_run_as_python_would_and_captured(tmp_path):
    done = run(tmp_path, "--out", "out", "script.py", "--lr", "3", "--help", "7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["['__main__', 'script.py', '--lr', '3', '--help', '7']"]
    (ops,) = load_trace(tmp_path / "out").devices
    sources = [each.instruction.source() for each in ops.operations if each.instruction and each.opcode == "dot"]
    assert all(source.file == str(tmp_path / "script.py") for source in sources)
    assert any(operation.module == "jit__lambda" for operation in ops.operations)


def test_an_error_of_the_script_is_shown_as_its_own(tmp_path):
    done = run(tmp_path, "script.py", script="import jax\njax.devices()\nraise KeyError('mine')\n")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr and "runpy" not in done.stderr and "run_script" not in done.stderr


def test_the_status_of_a_script_that_fails_matters_more_than_that_nothing_was_captured(tmp_path):
    done = run(tmp_path, "script.py", script="raise SystemExit('no data')\n")
    assert done.returncode == 1
    assert "no data" in done.stderr and "Nothing was captured" in done.stderr


def test_a_script_without_jax_has_nothing_to_capture(tmp_path):
    done = run(tmp_path, "script.py", script="print('done')\n")
    assert (done.returncode, done.stdout) == (2, "done\n")
    assert "Nothing was captured" in done.stderr and not (tmp_path / "profile").exists()


TIMED = """
import time, jax, jax.numpy as jnp
x, steps, end = jnp.ones(9), 0, time.monotonic() + 2
while time.monotonic() < end:
    x, steps = (x + 1).block_until_ready(), steps + 1
print(steps)
"""


def test_a_module_and_a_part_of_its_time(tmp_path):
    done = run(tmp_path, "--out", "out", "--delay-s", 0.2, "--duration-s", 0.6, "-m", "script", script=TIMED)
    assert done.returncode == 0, done.stderr
    (ops,) = load_trace(tmp_path / "out").devices
    assert 1 <= len(ops) < int(done.stdout)


def test_a_script_keeps_a_ring_of_captures_which_is_listed_and_exported(capsys, tmp_path):
    ring = ("--continuous", "--every-s", 0.3, "--ring-mb", 20)
    script = TIMED.replace("    x, steps", "    time.sleep(0.02)\n    x, steps")
    done = run(tmp_path, "--out", "out", *ring, "-m", "script", script=script)
    assert done.returncode == 0 and "stack profile ring out" in done.stderr, done.stderr
    answer = json.loads(printed(capsys, "ring", tmp_path / "out", "--output", tmp_path / "ring.pftrace", "--json"))
    facts = answer["facts"]
    assert facts["captures"] == len(answer["rows"]) > 0 and {row["kind"] for row in answer["rows"]} == {"normal"}
    assert facts["total_bytes"] <= 20_000_000 and facts["ring_mb"] == 20
    assert (tmp_path / "ring.pftrace").read_bytes().count(b"step duration") == 1
    assert "has no ring" in refused(capsys, "ring", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ring-mb", 1), "--ring-mb is a setting of --continuous"),
        (("--port", 9000), "--port is a setting of --listen"),
        (("--listen", "--duration-s", 5), "--duration-s has no effect with --listen"),
        (("--listen", "--stacks-hz", 0), "--stacks-hz has no effect with --listen"),
        (("--continuous", "--json"), "--json has no effect with --continuous"),
        (("--duration-s", -1), "--duration-s is -1"),
        (("--host-tracer-level", 9), "host_tracer_level is 9"),
    ],
)
def test_options_of_a_capture_without_effect_are_refused(capsys, options, message):
    assert message in refused(capsys, "run", *options, "-m", "this")
