"""Converts one trace with this repository and with XProf in turn, and compares time and memory.

    nox -s bench -- profile_conversion

The trace is a real capture of a loop that runs until it is large enough. Each conversion is a process of its own, from
its start to the file on the disk: the timeline (`stack profile export` for Perfetto, XProf's trace viewer), and the
table of operations (`stack profile ops`, XProf's HLO stats, which stays empty for a CPU, so that no ratio is asked
for). Writes `results/profile_conversion.md` and `.json`; fails when ours is over its limits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.peer import find_uv, run_quietly
from report import RESULTS, circumstances, table, write

LIMIT_S, LIMIT_BYTES, LIMIT_RATIO = 8.0, 1.5e9, 0.5
XPROF = "xprof>=2.24,<2.25"
# Many small operations a second, in a loop as training steps have them.
CAPTURE = """
import sys
import jax, jax.numpy as jnp
import stack_profile

def layer(x, weights):
    hidden = jnp.sort(jnp.tanh(x @ weights[0]), axis=-1)
    return x + hidden @ weights[1], jnp.max(hidden)

step = jax.jit(lambda x, weights: jax.lax.scan(layer, x, weights))
weights, x = jnp.full((200, 2, 16, 16), 0.01), jnp.ones((4, 16))
jax.block_until_ready(step(x, weights))
with stack_profile.capture(sys.argv[1], name="trace") as captured:
    for _ in range(int(sys.argv[2])):
        x, _ = step(x, weights)
        x.block_until_ready()
print(captured.wait())
"""
CONVERT = """
import sys
from xprof.convert import raw_to_tool_data as convert
trace, tool, output = sys.argv[1:]
answer = convert.xspace_to_tool_data([trace], tool, {"use_saved_result": False})[0]
open(output, "wb").write(answer.encode() if isinstance(answer, str) else answer)
"""
TRACE, OUTPUT = "TRACE", "OUTPUT"  # in a command
OURS = {
    "timeline": ("export", TRACE, "--to", "perfetto", "--output", OUTPUT),
    "operations": ("ops", TRACE, "--json"),
}
THEIRS = {"timeline": "trace_viewer", "operations": "hlo_stats"}


def main() -> None:
    arguments = _arguments()
    python = _xprof(arguments.environments.resolve() / "xprof")
    with tempfile.TemporaryDirectory() as folder:
        trace = _captured(Path(folder), arguments.megabytes * 1e6)
        runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {"stack": [], "xprof": []} for name in OURS}
        for _ in range(arguments.rounds):
            for name in OURS:
                runs[name]["stack"].append(_measured(_our_command(name), trace))
                runs[name]["xprof"].append(_measured([str(python), "-c", CONVERT, TRACE, THEIRS[name], OUTPUT], trace))
                print(json.dumps({name: {who: figures[-1] for who, figures in runs[name].items()}}), flush=True)
        size_bytes = trace.stat().st_size
    record = {
        **circumstances(),
        "trace_bytes": size_bytes,
        "limits": {"s": LIMIT_S, "peak_rss_bytes": LIMIT_BYTES, "ratio": LIMIT_RATIO},
        "versions": {"stack-profile": version("stack-profile"), "jax": version("jax"), "xprof": _version(python)},
        "runs": runs,
    }
    write(arguments.results, "profile_conversion", record, _markdown(record))
    if misses := _misses(runs):
        sys.exit("\n".join(misses))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the trace")
    parser.add_argument("--rounds", type=int, default=3)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where XProf is installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _xprof(folder: Path) -> Path:
    """The interpreter of XProf's environment, which is made on first use."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        run_quietly(find_uv(), "venv", "--clear", "--python", sys.executable, folder)
        run_quietly(find_uv(), "pip", "install", f"--python={python}", XPROF)
        (folder / "installed").touch()
    return python


def _version(python: Path) -> str:
    program = "from importlib.metadata import version; print(version('xprof'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _captured(folder: Path, size_bytes: float) -> Path:
    """A capture of about that size: a short one tells how many steps it takes."""
    steps = 20
    for _ in range(2):
        program = [sys.executable, "-c", CAPTURE, str(folder / str(steps)), str(steps)]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        trace = Path(done.stdout.split()[-1])
        steps = round(steps * size_bytes / trace.stat().st_size) + 1
    return trace


def _our_command(name: str) -> list[str]:
    return [sys.executable, "-m", "stack_core", "profile", *OURS[name]]


def _measured(command: Sequence[str], trace: Path) -> dict[str, float]:
    """Wall and CPU seconds and peak memory of a process, and how much it wrote or printed.

    The trace is in a folder of its own: XProf writes beside what it reads.
    """
    with tempfile.TemporaryDirectory(dir=trace.parent) as folder:
        link, output = Path(folder) / trace.name, Path(folder) / "output.json"
        os.link(trace, link)
        names = {TRACE: str(link), OUTPUT: str(output)}
        arguments = [names.get(argument, argument) for argument in command]
        with (Path(folder) / "printed.json").open("wb") as printed:
            started_s = time.perf_counter()
            process = subprocess.Popen(arguments, stdout=printed, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        written = [path.stat().st_size for path in (output, Path(printed.name)) if path.exists()]
    if process.returncode or not any(written):
        sys.exit(f"{' '.join(arguments)}\nfailed with exit code {process.returncode}, or wrote nothing")
    return {
        "s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "json_bytes": max(written),
    }


def _misses(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> list[str]:
    found = []
    for name, both in runs.items():
        median = {key: statistics.median(run[key] for run in both["stack"]) for key in ("s", "peak_rss_bytes")}
        if median["s"] > LIMIT_S or median["peak_rss_bytes"] > LIMIT_BYTES:
            found.append(f"{name}: {median['s']:.2f} s and {median['peak_rss_bytes'] / 1e9:.2f} GB are over the limits")
    if (ratio := _ratio(runs["timeline"], "s")[0]) > LIMIT_RATIO:
        found.append(f"timeline: {ratio:.2f} of XProf's time is over the limit {LIMIT_RATIO}")
    return found


def _ratio(both: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> tuple[float, float, float]:
    """Ours over XProf's within a round: median, least, most."""
    ratios = [ours[key] / theirs[key] for ours, theirs in zip(both["stack"], both["xprof"], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _markdown(record: Mapping[str, Any]) -> str:
    machine, rows = record["machine"], []
    for name, both in record["runs"].items():
        for who, figures in both.items():
            median = {key: statistics.median(run[key] for run in figures) for key in figures[0]}
            cells = [f"{median['s']:.2f}", f"{median['cpu_s']:.2f}"]
            cells += [f"{median['peak_rss_bytes'] / 1e9:.2f}", f"{median['json_bytes'] / 1e6:.1f}"]
            rows.append([f"{name}, {who}", *cells])
        cells = ["{:.2f} ({:.2f} to {:.2f})".format(*_ratio(both, key)) for key in ("s", "cpu_s", "peak_rss_bytes")]
        rows.append([f"{name}, ratio", *cells, ""])
    rounds = len(record["runs"]["timeline"]["stack"])
    lines = [
        "# A trace to JSON, beside XProf",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}, {machine['memory_bytes'] / 1e9:.0f} GB. A "
        f"capture of a CPU of {record['trace_bytes'] / 1e6:.0f} MB; medians of {rounds} rounds, ratios within a round.",
        "",
        *table(["", "s", "CPU-s", "peak memory, GB", "JSON, MB"], rows),
        "",
        "- " + ", ".join(f"{package} {number}" for package, number in record["versions"].items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
