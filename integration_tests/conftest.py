"""A temporary environment that distributions are installed into and removed from, offline."""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_EACH = """
import contextlib, io, json, sys
from stack_core.cli import main
found = []
for arguments in json.loads(sys.argv[1]):
    status, output, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as exit:
            status = exit.code or 0
    found.append([status, output.getvalue(), errors.getvalue()])
print(json.dumps(found))
"""
_CONTRACT = """
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", *sys.argv[1:]]))
"""


class Environment:
    """A virtual environment of its own, which also sees all that is installed in the running one.

    Args:
      folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self._wheels = folder / "wheels"
        self._uv("venv", "--python", sys.executable, str(folder))
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        running = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # addsitedir, and not the bare folder, because the packages may be installed there as links.
        lines = [f"import site; site.addsitedir({path!r})" for path in sorted(running)]
        (packages / "running_environment.pth").write_text("\n".join(lines) + "\n")

    @contextlib.contextmanager
    def installed(self, *projects: Path) -> Iterator[None]:
        """Builds the distributions in these folders, and has them installed for a while."""
        wheels = [self._built(project) for project in projects]
        self._uv("pip", "install", "--no-deps", f"--python={self.python}", *map(str, wheels))
        try:
            yield
        finally:
            names = [wheel.name.split("-")[0] for wheel in wheels]
            self._uv("pip", "uninstall", f"--python={self.python}", *names)

    def run(self, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs Python, with these environment variables beside those of the tests."""
        command = [str(self.python), *arguments]
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def stack(self, *arguments: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "stack_core", *arguments, check=check, **environ)

    def stack_each(self, *commands: Sequence[str], **environ: str) -> list[subprocess.CompletedProcess[str]]:
        """Runs commands of `stack` one after another in one process, because starting Python takes seconds."""
        done = self.run("-c", _EACH, json.dumps(commands), **environ)
        found = json.loads(done.stdout.splitlines()[-1])
        return [subprocess.CompletedProcess(each, *result) for each, result in zip(commands, found, strict=True)]

    def check_contract(self, example: Path, *options: str, code: str = "") -> str:
        """Runs code and then the tests of an example's contract, in one process; returns pytest's output."""
        suite = [str(example / "test_contract.py"), f"--rootdir={self._wheels}", *options]
        return self.run("-c", code + _CONTRACT, *suite).stdout

    def plugins(self, **environ: str) -> dict[str, dict[str, Any]]:
        """Returns the reports of `stack plugins --json`, by distribution."""
        done = self.stack("plugins", "--json", **environ)
        assert done.stderr == ""
        return self.reports_of(done)

    def reports_of(self, done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
        """Reads the output of `stack plugins --json`."""
        reports = {report["distribution"]: report for report in json.loads(done.stdout)["plugins"]}
        assert len(reports) == len(json.loads(done.stdout)["plugins"]), "each is reported once"
        return reports

    def _built(self, project: Path) -> Path:
        from hatchling.builders.wheel import WheelBuilder

        (wheel,) = WheelBuilder(str(project)).build(directory=str(self._wheels / project.name))
        return Path(wheel)

    def _uv(self, *arguments: str) -> None:
        from uv import find_uv_bin

        offline = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "UV_PYTHON_DOWNLOADS": "never"}
        subprocess.run([find_uv_bin(), *arguments, "--quiet"], env=os.environ | offline, check=True)


@pytest.fixture(scope="session")
def peer_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that installs a requirement into an environment of its own, and returns its Python."""
    from uv import find_uv_bin

    def install(requirement: str) -> Path:
        folder = tmp_path_factory.mktemp("peer")
        python = folder / "bin" / "python"
        subprocess.run([find_uv_bin(), "venv", "--quiet", folder], check=True)
        subprocess.run([find_uv_bin(), "pip", "install", "--quiet", f"--python={python}", requirement], check=True)
        return python

    return install


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def forced_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`stack serve` of a tiny Llama whose weights force its answers, for clients with the key `KEY`."""
    from .forced import write_forced_checkpoint
    from .served import KEY, Served

    directory = tmp_path_factory.mktemp("forced-llama")
    write_forced_checkpoint(directory)
    sizes = ("--max-sequences", "2", "--step-tokens", "64", "--decode-repeats", "1")
    served = Served(directory, *sizes, "--api-key", KEY)
    yield served
    assert "Traceback" not in served.stop()
