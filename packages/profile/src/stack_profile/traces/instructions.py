"""An instruction of a compiled program, with the Python lines and the scopes that asked for it."""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from stack_profile.traces.scopes import Scope, parse_op_name

__all__ = ["CONTAINERS", "Frame", "Instruction", "Origin", "called_by"]

Origin = Literal["own", "fused", "operand", "user", "caller", "none"]

# Instructions that run others: their time is that of what they run.
CONTAINERS: Final = frozenset({"while", "conditional", "call", "async-start", "async-done", "async-update"})


@dataclass(frozen=True)
class Frame:
    """A line of Python that was executed while the operation was traced.

    As text, a line of an installed package starts with the package's name: "optax/_src/update.py:42".
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def path(self) -> str:
        """The file, relative to the folder of installed packages if it is in one."""
        return _path_in_package(self.file)

    @property
    def package(self) -> str:
        """The installed package that the file is of, such as "optax"; "" where it is the user's own."""
        return _package(self.file)


@functools.lru_cache(maxsize=1 << 14)
def _package(file: str) -> str:
    match = next(filter(None, (pattern.search(file) for pattern in _PACKAGES)), None)
    return match[1] if match else ""


@functools.lru_cache(maxsize=1 << 14)
def _path_in_package(file: str) -> str:
    match = next(filter(None, (pattern.search(file) for pattern in _PACKAGES)), None)
    return file[match.start(1) :] if match else file


# The stack's own are packages too where they are installed for development, from the folders that hold their sources.
_PACKAGES: Final = (
    re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)"),
    re.compile(r"[/\\](stack_(?:core|kernels|quant|train|rl|serve|profile))[/\\]"),
    re.compile(r"[/\\]lib[/\\](python3)\.\d+[/\\]"),
)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      id: unique in the module.
      computation: the function of the module that it is in.
      op_name: "jit(step)/jvp(mlp)/dot_general", or "".
      frames: the Python stack, innermost first; empty where none is known.
      outer: how many of the outermost frames called the program, for all of it has them.
      origin: whose op_name and frames these are: its own; those of what it fuses; of what it reads; of what reads it;
        of the loop or call that it is in; or nobody's.
      fused: it is a part of a fusion and never runs for itself.
      opcodes: its own, or those of what it fuses.
      parts: the names of what it fuses, the result first.
      target: which library or kernel a custom call calls, or "".
      argument: of a parameter the name that JAX gave it, such as "state.params['kernel']", or "".
    """

    id: int
    name: str
    opcode: str
    computation: str
    op_name: str
    frames: tuple[Frame, ...]
    outer: int
    origin: Origin
    fused: bool
    opcodes: frozenset[str]
    parts: tuple[str, ...]
    target: str
    argument: str

    @property
    def scope(self) -> Scope:
        return parse_op_name(self.op_name)

    @property
    def layer(self) -> str:
        """The named scopes; where the program names none, the classes whose `__call__` it is in; or ""."""
        if path := self.scope.path:
            return path
        classes: list[str] = []
        for frame in self._inside:
            name = match[1] if (match := _CALL.search(frame.function)) and _is_layer(match[1], frame) else None
            if name in classes[:-1] or _function(frame) == self._traced:
                break  # JAX puts the stack of the pass being differentiated on top of its own
            if name is not None and classes[-1:] != [name]:
                classes.append(name)
        return "/".join(reversed(classes))

    def source(self, within: str = "") -> Frame | None:
        """The user's line, or the innermost of a file under `within` if that is given; None where none is known.

        It is the innermost line outside of installed packages. A program all of whose lines are in packages is that of
        the package whose function was traced: its innermost line, rather than that of an op which it calls.
        """
        if within:
            return next((frame for frame in self.frames if frame.file.startswith(within)), None)
        inside = self._inside or self.frames[:1]
        users = (frame for frame in inside if not frame.package)
        own = (frame for frame in inside if frame.package == inside[-1].package)
        return next(users, next(own, None))

    @property
    def package_source(self) -> Frame | None:
        """The innermost line if it is in an installed package and not the user's line; else None.

        Of an op of stack-core this is the line of its public function, such as `stack_core.ops.linear`: the frames
        within belong to the choice of an implementation.
        """
        innermost = list(itertools.takewhile(lambda frame: frame.package == _OPS_PACKAGE, self.frames))[-1:]
        line = next(iter(innermost or self.frames), None)
        return None if line == self.source() else line

    @property
    def _traced(self) -> str | None:
        """The name of the function that was compiled."""
        return match[1] if (match := _TRACED.match(self.op_name)) else None

    @property
    def _inside(self) -> tuple[Frame, ...]:
        """The frames of the function that was compiled, its own the last."""
        frames = self.frames[: max(len(self.frames) - self.outer, 0)]
        traced = [place for place, frame in enumerate(frames) if _function(frame) == self._traced]
        return frames[: traced[-1] + 1] if traced else frames


def called_by(stacks: Iterable[tuple[Frame, ...]], op_name: str) -> int:
    """How many frames, the outermost, are around the function that was compiled in all stacks of a program.

    Args:
      op_name: of any of its instructions; frames inside the function that it names are the program's own.
    """
    found = iter(stacks)
    first = next(found, ())
    common = len(first)
    for stack in found:
        while common and stack[-common:] != first[-common:]:
            common -= 1
    traced = match[1] if (match := _TRACED.match(op_name)) else None
    shared = enumerate(reversed(first[len(first) - common :]))
    return next((place for place, frame in shared if _function(frame) == traced), common)


def _is_layer(name: str, frame: Frame) -> bool:
    """Whether the class of a `__call__` is a layer: neither the machinery of ops nor a config, such as an objective."""
    return frame.package != _OPS_PACKAGE and not name.endswith("Config")


def _function(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


_OPS_PACKAGE: Final = "stack_core"
_CALL: Final = re.compile(r"(\w+)\.__call__\b")
_TRACED: Final = re.compile(r"p?jit\(([^()]+)\)")
