"""Libraries that are measured in processes of their own, each in an environment of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.peer import find_python, run_quietly

__all__ = ["Worker", "install", "versions_of"]

# Libraries print other lines, some of which begin with a bracket.
_ANSWERS = ('"', "{", "[[")


class Worker:
    """The process of a library, which answers lines on its standard input with lines of JSON.

    The constructor waits for the first answer.

    Args:
      python: interpreter of the library's environment.
      program: program that measures the library.
      arguments: arguments of the program.
    """

    def __init__(self, python: Path, program: Path, arguments: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [python, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        )
        try:
            self._answer()
        except BaseException:  # Ctrl-C too must leave no process behind
            self.close()
            raise

    def ask(self, line: str = "") -> Any:
        """Writes a line and returns the answer."""
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWERS):
                return json.loads(line)
        raise RuntimeError(f"A library ended with status {self._process.wait()}.")


def install(folder: Path, requirements: Sequence[str], python: str | None) -> Path:
    """Returns the interpreter of an environment, which is made on first use.

    By pip and not uv: a machine may offer pip a small CPU-only PyTorch through `find-links`.

    Args:
      python: version of the interpreter; None for that of this process.
    """
    interpreter, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists() or installed.read_text() != "\n".join(requirements):
        run_quietly(sys.executable if python is None else find_python(python), "-m", "venv", "--clear", folder)
        run_quietly(interpreter, "-m", "pip", "install", *requirements)
        installed.write_text("\n".join(requirements))
    return interpreter


def versions_of(python: str | Path, packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of distributions in an environment."""
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, found.stdout.split(), strict=True))
