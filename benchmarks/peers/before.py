"""The peer `before`: this repository at an earlier commit, in a separate environment; it shows what a change costs.

It is started as the benchmark of that commit starts it, so that keys and names may have changed since.
"""

import importlib.util
import io
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

from peers import stack_train
from peers.peer import Command, Peer, Workload, find_uv, run_quietly

__all__ = ["benchmarks_of", "environment_of", "full_commit", "name_of", "peer_of"]

_ROOT = Path(__file__).parents[2]
_EXTRAS = {"kernels": "cpu", "serve": "structured"}


def full_commit(commit: str) -> str:
    """The whole name of a commit, branch or tag; the program ends where there is none."""
    found = subprocess.run(
        ["git", "-C", _ROOT, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        sys.exit(f"--before {commit} is no commit of this repository.")
    return found.stdout.strip()


def name_of(commit: str) -> str:
    return f"stack at {commit[:12]}"


def peer_of(commit: str) -> Peer:
    """The trainer of a whole commit."""
    theirs: list[Peer] = []

    def install(folder: Path, workload: Workload) -> Path:
        python = environment_of(commit, folder)
        theirs[:] = [_trainer_in(benchmarks_of(folder))]
        stack_train.fill_cache(theirs[0], python, folder, workload)
        return python

    def command(python: Path, workload: Workload, steps: int) -> Command:
        return theirs[0].command(python, workload, steps)

    return replace(stack_train.PEER, name=name_of(commit), install=install, command=command)


def benchmarks_of(folder: Path) -> Path:
    """The benchmarks of the commit of which `folder` has the environment."""
    return folder / "source" / "benchmarks"


def _trainer_in(benchmarks: Path) -> Peer:
    """How a commit's own benchmark starts its trainer; what the module imports is today's."""
    spec = importlib.util.spec_from_file_location("trainer_before", benchmarks / "peers" / "stack_train.py")
    assert spec is not None and spec.loader is not None, "the file's name ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PEER


def environment_of(commit: str, folder: Path) -> Path:
    """The Python of an environment with a commit's packages, built from its own source with its own pins."""
    python, installed = folder / "bin" / "python", folder / "installed"
    if installed.exists():
        return python
    run_quietly(find_uv(), "venv", "--clear", "--python", sys.executable, folder)
    source, wheels = folder / "source", folder / "wheels"
    archive = subprocess.run(["git", "-C", _ROOT, "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    pins = source / "constraints" / f"py{sys.version_info.major}{sys.version_info.minor}.txt"
    packages = sorted(path.parent for path in source.glob("packages/*/pyproject.toml"))
    for package in packages:
        build = (find_uv(), "build", "--quiet", "--wheel", f"--out-dir={wheels}", f"--build-constraints={pins}")
        run_quietly(*build, package)
    named = [f"{next(wheels.glob(f'stack_{package.name}-*.whl'))}{_extra(package)}" for package in packages]
    run_quietly(find_uv(), "pip", "install", "--compile-bytecode", "--python", python, f"--constraint={pins}", *named)
    installed.touch()
    return python


def _extra(package: Path) -> str:
    """The extra that a package needs to be at its best here, where it had that one."""
    extra = _EXTRAS.get(package.name)
    offered = tomllib.loads((package / "pyproject.toml").read_text())["project"].get("optional-dependencies", {})
    return f"[{extra}]" if extra in offered else ""
