"""CPU seconds of `import stack_core` and of `stack --help`, alone and beside many plugins.

    nox -s bench -- startup

The plugins are distributions in a folder of their own: metadata, entry points, and a module that registers a command,
an op and an observer, as a plugin does that imports nothing else. Programs take turns, a fresh process each time; the
first round, which compiles bytecode, is left out. Writes `results/startup.md` and `.json`; fails when a median is over
its limit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import RESULTS, circumstances, table, write

# What must not be exceeded: program -> plugins beside those installed -> CPU seconds.
LIMITS_S = {"import stack_core": {0: 0.15, 50: 0.15}, "stack --help": {0: 0.5, 50: 0.6}}
IMPORT = "import time; begun_s = time.process_time(); import stack_core; print(time.process_time() - begun_s)"
PLUGIN = '''"""A plugin of a third party."""

from stack_core import hookimpl

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_commands(registry):
    registry.add("dummy{number}", "dummy{number}.command:run", help="Do nothing, {number} times.")


@hookimpl
def stack_register_ops(registry):
    registry.add("norm/dummy{number}", "dummy{number}.norm:IMPLEMENTATION")


@hookimpl
def stack_register_observers(registry):
    registry.add("dummy{number}", "dummy{number}.observer:observer")
'''
METADATA = """Metadata-Version: 2.4
Name: dummy-{number}
Version: 1.{number}
Summary: A plugin of a third party
Requires-Python: >=3.11
Requires-Dist: stack-core
Description-Content-Type: text/markdown

# dummy-{number}

"""

Runs = Mapping[str, Mapping[str, Sequence[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--plugins", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.plugins) < 1:
        parser.error("--rounds and --plugins must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        runs = _measured(Path(folder), arguments.rounds, arguments.plugins)
    versions = {package: version(package) for package in ("stack-core", "pluggy", "cyclopts", "jax")}
    record = {
        **circumstances(),
        "versions": {"python": sys.version.split()[0], **versions},
        "rounds": arguments.rounds,
        "limits_s": LIMITS_S,
        "cpu_s": runs,
    }
    write(arguments.results, "startup", record, _markdown(record))
    if not all(_keeps(program, int(count), cpu_s) for program in runs for count, cpu_s in runs[program].items()):
        raise SystemExit("over the limit")


def _measured(folder: Path, rounds: int, plugins: int) -> dict[str, dict[str, list[float]]]:
    """CPU seconds by program and by the number of plugins."""
    _write_plugins(folder / "plugins", plugins)
    # Bytecode has a place of its own, so that no run depends on what an installer or an earlier run compiled.
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environs = {0: environ, plugins: {**environ, "PYTHONPATH": str(folder / "plugins")}}
    programs = {"bare interpreter": _bare_s, "import stack_core": _import_s, "stack --help": _help_s}
    runs: dict[str, dict[str, list[float]]] = {name: {str(count): [] for count in environs} for name in programs}
    for round_number in range(rounds + 1):
        for name, program in programs.items():
            for count, environ in environs.items():
                cpu_s = program(environ)
                if round_number:
                    runs[name][str(count)].append(cpu_s)
    return runs


def _write_plugins(folder: Path, count: int) -> None:
    for number in range(count):
        package, info = folder / f"dummy{number}", folder / f"dummy_{number}-1.{number}.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(PLUGIN.format(number=number))
        (info / "METADATA").write_text(METADATA.format(number=number) + "What it does, at some length. " * 100)
        (info / "entry_points.txt").write_text(f"[stack.plugins.v1]\ndummy{number} = dummy{number}.plugin\n")


def _bare_s(environ: Mapping[str, str]) -> float:
    return _process_s(["-c", "pass"], environ)


def _import_s(environ: Mapping[str, str]) -> float:
    """What the import adds to the interpreter, as the process itself counts it."""
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def _help_s(environ: Mapping[str, str]) -> float:
    return _process_s([str(Path(sys.executable).with_name("stack")), "--help"], environ)


def _process_s(arguments: Sequence[str], environ: Mapping[str, str]) -> float:
    """User and system time of a whole Python process."""
    process = subprocess.Popen([sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} exited with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _markdown(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rows = [
        [program, count, *_figures(runs), *_verdict(program, int(count), runs)]
        for program, by_count in record["cpu_s"].items()
        for count, runs in by_count.items()
    ]
    lines = [
        "# Starting up",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}. CPU seconds of {record['rounds']} "
        "interleaved rounds; `stack --help` is a whole process, the bare interpreter included.",
        "",
        *table(["", "more plugins", "median", "least to most", "limit", "kept"], rows),
    ]
    return "\n".join(lines) + "\n"


def _figures(runs: Sequence[float]) -> list[str]:
    return [f"{statistics.median(runs):.3f}", f"{min(runs):.3f} to {max(runs):.3f}"]


def _verdict(program: str, count: int, runs: Sequence[float]) -> list[str]:
    limit_s = LIMITS_S.get(program, {}).get(count)
    return ["none", ""] if limit_s is None else [f"{limit_s:g}", "yes" if _keeps(program, count, runs) else "no"]


def _keeps(program: str, count: int, runs: Sequence[float]) -> bool:
    return statistics.median(runs) <= LIMITS_S.get(program, {}).get(count, float("inf"))


if __name__ == "__main__":
    main()
