"""Whether packages that were installed together work at all; `nox -s matrix` runs it in an environment of theirs.

    python smoke.py core train [--steps]

The arguments are the packages that should be there, and no others. `--steps` also trains a tiny model for two steps, on
the source of Python's standard library.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
model: {name: llama, vocab_size: 300, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 32}
data: {source: stdlib, seq_tokens: 16, batch_size: 2}
optimizer: {name: adamw}
run: {steps: 2}
"""


def stack(*arguments: str) -> str:
    """Runs the command that is installed beside this interpreter and returns what it printed."""
    command = [str(Path(sys.executable).with_name("stack")), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_plugins(packages: list[str]) -> dict[str, dict[str, list[str]]]:
    """Returns the names that each package registered, by registry."""
    for package in packages:
        importlib.import_module(f"stack_{package}")
    assert "plugins" in stack("--help")
    listing = json.loads(stack("plugins", "--json"))
    reports = listing["plugins"]
    assert {report["name"] for report in reports} == set(packages), reports
    assert all(report["status"] == "loaded" and not report["problems"] for report in reports), reports
    assert not listing["problems"], listing["problems"]
    return {report["name"]: report["registered"] for report in reports}


def check_ops() -> None:
    import jax
    import numpy as np

    from stack_core import ops

    x, weight = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 4), np.float32)
    np.testing.assert_allclose(jax.jit(ops.linear)(x, weight), x @ weight)


def check_kernels(registered: dict[str, list[str]]) -> None:
    """On a CPU, where this runs, ops go to the implementations for CPUs; the commands start."""
    assert {"bench ops", "tune"} <= set(registered["commands"]), registered
    import numpy as np

    from stack_core import ops

    (call,) = ops.explain(ops.linear, np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))
    for chosen in (call.forward, call.backward):
        assert f"linear/{chosen.implementation.name}" in registered["ops"], str(call)
    assert "--budget" in stack("tune", "--help")
    assert "--compare" in stack("bench", "ops", "--help")


def check_steps() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, run = Path(folder) / "run.yaml", Path(folder) / "run"
        config.write_text(RUN)
        stack("train", str(config), "--output", str(run))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2], records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--steps", action="store_true")
    arguments = parser.parse_args()
    registered = check_plugins(arguments.packages)
    check_ops()
    if "kernels" in registered:
        check_kernels(registered["kernels"])
    if arguments.steps:
        check_steps()


if __name__ == "__main__":
    main()
