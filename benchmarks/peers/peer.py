"""What every peer has in common: the workload, an environment, and a command that prints its completed steps."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Command", "Peer", "Workload", "find_python", "find_uv", "run_quietly"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama with untied embeddings, trained by AdamW with fp32 parameters; `dtype` is what it computes in.

    The defaults have 66 million parameters.
    """

    layers: int = 8
    embed: int = 512
    heads: int = 8
    mlp: int = 2048
    vocab: int = 32_000
    seq_tokens: int = 512
    batch: int = 4
    dtype: str = "float32"

    @property
    def step_tokens(self) -> int:
        return self.batch * self.seq_tokens

    @property
    def token_flops(self) -> float:
        """What the products of a step must do for a token, forward and backward; of attention the causal half."""
        layer = 4 * self.embed**2 + 3 * self.embed * self.mlp + self.seq_tokens * self.embed
        return 3 * 2 * (self.layers * layer + self.embed * self.vocab)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to start, and how to see that a step has completed.

    Attributes:
      step_line: a pattern that matches one line a completed step.
      log: the file that gets these lines, relative to the folder the command runs in; None is its standard output.
    """

    arguments: Sequence[str]
    step_line: str
    log: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A trainer in an environment of its own.

    Attributes:
      install: (folder, workload) -> python; fills the folder on first use, and does there what is not to be measured.
      command: (python, workload, steps) -> how to train for at least that many steps.
      packages: distributions whose versions stand beside the figures.
    """

    name: str
    install: Callable[[Path, Workload], Path]
    command: Callable[[Path, Workload, int], Command]
    packages: tuple[str, ...]


def find_uv() -> str:
    """The uv that nox names in `$UV`, or the one on the path."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        sys.exit("The peers' environments are made with uv; put it on the path, or start this with `nox -s bench`.")
    return uv


def find_python(version: str) -> str:
    """An interpreter of that version that is already on this machine."""
    found = subprocess.run(
        [find_uv(), "python", "find", "--no-python-downloads", version], capture_output=True, text=True, check=False
    )
    if found.returncode:
        sys.exit(f"A peer needs Python {version}; `nox -s bench` also finds pyenv's. {found.stderr.strip()}")
    return found.stdout.strip()


def run_quietly(*command: str | Path, folder: str | None = None) -> None:
    """Runs a command, in `folder` if one is given, and shows its output only if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nfailed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
