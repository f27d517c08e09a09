"""Compares ops, as models call them, with their peers: `jax.nn`, `jax.lax`, plain `jnp`, Tokamax, Qwix.

    nox -s bench -- ops_vs_peers --ops attention norm --cases bfloat16 --rounds 15

The calls are in `op_cases/`, one file an op. The contenders of a call take turns in one process, because a machine's
speed drifts: only ratios within a round mean anything. Each must first give the right answer. Peak memory is that of a
process a contender. Tokamax needs Python 3.12, so that all of this runs in an environment of its own, unless Tokamax is
where it is started. Writes `results/ops_vs_peers-MACHINE.md` and `.json`; measured calls replace earlier ones there.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from op_cases import Case
from peers.peer import find_python, find_uv, run_quietly
from report import RESULTS, beside, circumstances, spread, table, write

ROOT = Path(__file__).parents[1]
OPS = sorted(path.stem for path in (ROOT / "benchmarks" / "op_cases").glob("[a-z]*.py"))
TOKAMAX_PYTHON = "3.12"
PEERS = ("tokamax==0.0.17", "qwix==0.1.8")
PACKAGES = ("stack-core", "stack-kernels", "jax", "jaxlib", "tokamax", "qwix")
OURS, CORE = "stack", "core"
PREPARATION_S = 240  # what a case may take before its first round, and one round more than it should

Results = dict[str, dict[str, dict[str, Any]]]


def main() -> None:
    arguments = _arguments()
    if importlib.util.find_spec("tokamax") is None:
        python = _installed(arguments.environments.resolve() / "tokamax")
        sys.exit(subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode)
    name = f"ops_vs_peers-{_machine()}"
    earlier = arguments.results / f"{name}.json"
    results: Results = json.loads(earlier.read_text()) if earlier.exists() else {}
    try:
        for op, number, case in _cases(arguments):
            row = {**circumstances(), "versions": {package: version(package) for package in PACKAGES}}
            row["contenders"] = _raced(op, number, case, arguments)
            results.setdefault(op, {})[_title(case)] = row
            print(op, _title(case), *_cells(row, list(row["contenders"])), sep=" | ", flush=True)
    finally:
        write(arguments.results, name, results, _markdown(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", choices=OPS, default=OPS)
    parser.add_argument("--cases", default="", help="a regular expression: only cases whose name and direction match")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=60, help="a case has no further round after that")
    most = int(0.8 * _available_bytes())
    parser.add_argument("--memory-bytes", type=int, default=most, help="calls that need more are not run")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where the peers are installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _machine() -> str:
    """The processor's name as a part of a file's name, "intel-xeon"."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((R|TM)\)", " ", circumstances()["machine"]["cpu"]).lower())
    return "-".join(word for word in words if word not in ("processor", "cpu"))


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _installed(folder: Path) -> Path:
    """An environment with the packages of this repository as they are now, and the peers."""
    python = folder / "bin" / "python"
    if not python.exists():
        run_quietly(find_uv(), "venv", f"--python={find_python(TOKAMAX_PYTHON)}", folder)
    ours = [f"--editable={ROOT / 'packages' / name}" for name in ("core", "kernels[cpu]")]
    pins = f"--constraints={ROOT / 'constraints' / 'py312.txt'}"
    run_quietly(find_uv(), "pip", "install", f"--python={python}", pins, *ours, *PEERS)
    return python


def _cases(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Case]]:
    for op in arguments.ops:
        for number, case in enumerate(importlib.import_module(f"op_cases.{op}").CASES):
            if re.search(arguments.cases, _title(case)):
                yield op, number, case


def _title(case: Case) -> str:
    return f"{case.name}, {'with gradient' if case.gradient else 'forward'}"


def _raced(op: str, number: int, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is known of each contender: a summary of its rounds, and whatever else its process said of it."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in case.contenders}
    found: dict[str, dict[str, Any]] = {name: {} for name in case.contenders}
    for line in _said(op, number, arguments):
        name = line.pop("contender")
        rounds[name].append(line) if "s" in line else found[name].update(line)
    for name, entry in found.items():
        entry.update(beside(rounds[OURS], rounds[name]))
    for name in case.contenders if case.memory else ():
        if "problem" not in found[name]:
            for line in _said(op, number, arguments, f"--memory-of={name}"):
                found[name]["peak_bytes"] = line["peak_bytes"]
    for entry in found.values():
        if not entry["rounds"]:
            entry.setdefault("problem", "not measured: its process ended before")
    return found


def _said(op: str, number: int, arguments: argparse.Namespace, *more: str) -> Iterator[dict[str, Any]]:
    """The lines of a case's process, which is ended when it takes far longer than it may."""
    limits = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("rounds", "limit-s", "memory-bytes")
    ]
    command = [sys.executable, "-m", "side_by_side", op, str(number), *limits, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    ending = threading.Timer(arguments.limit_s + PREPARATION_S, process.kill)
    ending.start()
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)
    ending.cancel()
    if process.wait():
        print(f"{shlex.join(command)}: ended with status {process.returncode}", file=sys.stderr)


def _markdown(results: Results) -> str:
    lines = [
        "# Ops beside their peers",
        "",
        "`stack` is the op with stack-kernels installed; in brackets what it ran, forward / backward. Each further "
        "column is its time over that contender's, within a round: median (least to most); below 1 it is faster. "
        "`core` is its reference; `best peer` is, of the others, the one with the lowest median.",
    ]
    for op, rows in sorted(results.items()):
        names = list(dict.fromkeys(name for row in rows.values() for name in row["contenders"]))
        heading = [op, "ms", "CPU-ms", *(name for name in names if name != OURS), "best peer"]
        lines += ["", f"## {op}", "", *table(heading, [[title, *_cells(row, names)] for title, row in rows.items()])]
        lines += ["", *_memory(rows, names)]
        lines += sorted({f"- {_circumstances(row)}" for row in rows.values()})
    return "\n".join(lines) + "\n"


def _circumstances(row: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
    return f"{row['date']}, {row['machine']['cpus']} CPUs of {row['machine']['cpu']}; {versions}"


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    contenders = row["contenders"]
    ours = contenders[OURS]
    cells = [ours.get("problem", ""), ""]
    if ours["rounds"]:
        cells = [f"{1e3 * _median(ours, 's'):.3g} ({ours.get('chosen')})", f"{1e3 * _median(ours, 'cpu_s'):.3g}"]
    cells += [_ratio(contenders[name]) if name in contenders else "" for name in names if name != OURS]
    peers = {name: entry for name, entry in contenders.items() if name not in {OURS, CORE} and entry["rounds"]}
    best = min(peers, key=lambda name: _median(peers[name], "s"), default=None)
    return [*cells, f"{best}: {_ratio(peers[best])}, CPU {_ratio(peers[best], 'cpu_s')}" if best else ""]


def _median(entry: Mapping[str, Any], key: str) -> float:
    return entry[key][2]


def _ratio(entry: Mapping[str, Any], key: str = "s") -> str:
    if not entry["rounds"]:
        return entry["problem"].replace("|", "/")
    return spread(entry["stack over it"][key]) if entry["stack over it"] else ""


def _memory(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """A table of peak memory, if it was measured."""
    measured = {title: row["contenders"] for title, row in rows.items() if "peak_bytes" in row["contenders"][OURS]}
    if not measured:
        return []
    peaks = {
        title: [
            f"{entry['peak_bytes'] / 2**20:.0f}" if (entry := each.get(name, {})).get("peak_bytes") else ""
            for name in names
        ]
        for title, each in measured.items()
    }
    return [*table(["peak MiB", *names], [[title, *cells] for title, cells in peaks.items()]), ""]


if __name__ == "__main__":
    main()
