"""`stack profile gate` and `costs` as continuous integration calls them: by their exit codes."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from stack_core.cli import main

MODEL = """
import jax
import jax.numpy as jnp

def step(x):
    with jax.named_scope("head"):
        return jnp.sort(x @ x)

def example_args():
    return jax.ShapeDtypeStruct((64, 64), jnp.float32)
"""


@pytest.fixture
def traces(build, tmp_path):
    """A capture, one in which dot.1 is slower, and one of as many steps as tell nothing."""
    rng = np.random.default_rng(0)
    for name, slow, steps, noise in (("base", 1, 20, 5), ("same", 1, 20, 5), ("slow", 1.2, 20, 5), ("few", 1, 3, 400)):
        times = {"dot.1": slow * 2000, "dot.2": 1000, "dot.3": 1500, "dot.4": 500}
        times = {op: (mean + noise * rng.normal(size=steps)).astype(int) for op, mean in times.items()}
        (tmp_path / f"{name}.xplane.pb").write_bytes(build.steps(times))
    (tmp_path / "damaged.xplane.pb").write_bytes(b"no trace")
    return tmp_path


def run(folder, command, *tokens):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = [sys.executable, "-m", "stack_core", "profile", command, *tokens]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("new", "options", "status", "said"),
    [
        ("same", (), 0, "\n  within\n"),
        ("slow", (), 1, "\n  regressed\n  no line (jit_step: dot.1): 2 ms -> 2.4 ms\n"),
        ("slow", ("--max-regression", "1%", "step_time=20%"), 0, "allowed +20.00%\n  within\n"),
        ("few", (), 1, "\n  undecided: the steps vary too much."),
        ("few", ("--undecided", "pass"), 0, "\n  undecided: the steps vary too much."),
    ],
)
def test_exit_codes_of_captures(traces, capsys, monkeypatch, new, options, status, said):
    monkeypatch.chdir(traces)
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as end:
        main(["profile", "gate", "base.xplane.pb", f"{new}.xplane.pb", *options])
    assert status == (end.value.code if end else 0)
    out = capsys.readouterr().out
    assert said in out and out.startswith("step_time: 5.1 ms -> ")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (("base.xplane.pb", "missing"), "does not exist"),
        (("base.xplane.pb", "damaged.xplane.pb"), "damaged.xplane.pb"),
        (("base.xplane.pb", "same.xplane.pb", "--metric", "memory"), "memory of base and new is unknown"),
        (("base.xplane.pb", "same.xplane.pb", "--max-regression", "memori=3%"), "Did you mean 'memory'"),
        (("base.xplane.pb", "same.xplane.pb", "--max-regression", "three"), "'three' is not a share"),
        (("model.py:step", "base.xplane.pb"), "costs model.py:step --out FILE"),
        (("costs.json", "base.xplane.pb"), "holds no costs of a program"),
        (("base.xplane.pb", "model.py:step", "--b", "same.xplane.pb"), "is not a capture"),
        (("base.xplane.pb", "same.xplane.pb", "--compilations", "5"), "--compilations is for a function"),
    ],
)
def test_mistakes_exit_with_2(traces, capsys, monkeypatch, tokens, said):
    monkeypatch.chdir(traces)
    (traces / "costs.json").write_text("{}")
    with pytest.raises(SystemExit) as end:
        main(["profile", "gate", *tokens])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_function_is_compared_with_kept_costs_and_not_run(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    kept = run(tmp_path, "costs", "model.py:step", "--out", "base.json", "--compilations", "1")
    assert kept.returncode == 0 and "model.py:7" in kept.stdout, kept
    again = run(tmp_path, "gate", "base.json", "model.py:step", "--compilations", "1")
    assert again.returncode == 0 and "flops: 524 k -> 524 k" in again.stdout, again
    grown = MODEL.replace("def step(x):", "def step(x):\n    assert not isinstance(x, jax.Array) or x.aval")
    (tmp_path / "model.py").write_text(grown.replace("x @ x", "x @ x @ x"))
    done = run(tmp_path, "gate", "base.json", "model.py:step", "--compilations", "1", "--json")
    assert done.returncode == 1, done
    answer = json.loads(done.stdout)
    assert answer["facts"]["regressed"] >= 1
    flops = next(row for row in answer["rows"] if row["metric"] == "flops")
    assert (flops["verdict"], flops["change_base_share"]) == ("regressed", 1.0)
    assert flops["at_fault"] == [f"{tmp_path / 'model.py'}:8 (head): 524 k -> 1.05 M"]


def test_files_of_costs_alone_are_compared(capsys, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    for name in ("base", "new"):
        main(["profile", "costs", f"{tmp_path / 'model.py'}:step", "--out", str(tmp_path / f"{name}.json"), "--json"])
        assert json.loads(capsys.readouterr().out)["facts"]["flops"] == 2 * 64**3
    tokens = ["profile", "gate", str(tmp_path / "base.json"), str(tmp_path / "new.json"), "--metric", "memory", "flops"]
    main(tokens)
    assert "memory" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*tokens, "--report", str(tmp_path / "page.html")])
    assert "--report needs captures on both sides" in capsys.readouterr().err
