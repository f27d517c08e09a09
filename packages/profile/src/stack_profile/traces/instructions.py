"""Instructions of a compiled program, with their Python lines and scopes."""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from stack_profile.traces.scopes import Scope, parse_op_name

__all__ = ["CONTAINERS", "Frame", "Instruction", "Origin", "called_by"]

Origin = Literal["own", "fused", "operand", "user", "caller", "none"]

# Instructions that run others; their time belongs to the instructions they run.
CONTAINERS: Final = frozenset({"while", "conditional", "call", "async-start", "async-done", "async-update"})


@dataclass(frozen=True)
class Frame:
    """A Python line that was executing while the operation was traced.

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
        """Installed package of the file, such as "optax"; "" for the user's own files."""
        return _package(self.file)


@functools.lru_cache(maxsize=1 << 14)
def _package(file: str) -> str:
    match = next(filter(None, (pattern.search(file) for pattern in _PACKAGES)), None)
    return match[1] if match else ""


@functools.lru_cache(maxsize=1 << 14)
def _path_in_package(file: str) -> str:
    match = next(filter(None, (pattern.search(file) for pattern in _PACKAGES)), None)
    return file[match.start(1) :] if match else file


# The second pattern is for editable installs of the stack, which are outside of site-packages.
_PACKAGES: Final = (
    re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)"),
    re.compile(r"[/\\](stack_(?:core|kernels|quant|train|rl|serve|profile))[/\\]"),
    re.compile(r"[/\\]lib[/\\](python3)\.\d+[/\\]"),
)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      id: unique id in the module.
      name: name of the instruction.
      opcode: opcode of the instruction.
      computation: name of the enclosing computation.
      op_name: JAX's name, such as "jit(step)/jvp(mlp)/dot_general", or "".
      frames: Python stack, innermost first; empty if unknown.
      outer: number of outermost frames that called the program, common to all of its instructions.
      origin: source of `op_name` and `frames`: the instruction itself, the instructions it fuses, an operand, a user,
        the enclosing loop or call, or none.
      fused: True if it is part of a fusion and never runs separately.
      opcodes: opcodes of the fused instructions, or the single opcode.
      parts: names of the instructions it fuses, the root first.
      target: library or kernel of a custom call, or "".
      argument: JAX's name of a parameter, such as "state.params['kernel']", or "".
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
        """Named scopes, or without any the classes whose `__call__` contains the instruction, or "".

        Both are combined if the scopes are functions around the classes, such as "decode/Decoder/Block", or names that
        a library gives its kernels.
        """
        names, (classes, around) = self.scope.names, self._classes
        if not names or not classes:
            return "/".join(names or classes)
        outer = len(list(itertools.takewhile(around.__contains__, names)))
        # Flax and Equinox name a scope after each class themselves.
        is_named = any(each.lower() in name.lower() for each in classes for name in names)
        if is_named or not (outer or "custom-call" in self.opcodes):
            return "/".join(names)
        return "/".join((*names[:outer], *classes, *names[outer:]))

    @property
    def _classes(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """Classes whose `__call__` contains the instruction, outermost first, and names of functions around them."""
        classes: list[str] = []
        around = 0
        frames = self._inside
        for place, frame in enumerate(frames):
            name = match[1] if (match := _CALL.search(frame.function)) and _is_layer(match[1], frame) else None
            if name in classes[:-1] or _function(frame) == self._traced:
                break  # JAX puts the stack of the differentiated pass on top of the backward pass's own.
            if name is not None and classes[-1:] != [name]:
                classes.append(name)
                around = place + 1
        return tuple(reversed(classes)), frozenset(_function(frame) for frame in frames[around:])

    def source(self, within: str = "") -> Frame | None:
        """Returns the user's line, or the innermost line of a file under `within` if given; None if unknown.

        The user's line is the innermost one outside of installed packages. If all lines are in packages, the program
        belongs to the package of the traced function. Then the innermost line of that package is returned, which skips
        the ops that the package calls.
        """
        if within:
            return next((frame for frame in self.frames if frame.file.startswith(within)), None)
        inside = self._inside or self.frames[:1]
        users = (frame for frame in inside if not frame.package)
        own = (frame for frame in inside if frame.package == inside[-1].package)
        return next(users, next(own, None))

    @property
    def package_source(self) -> Frame | None:
        """The innermost line if it is in an installed package and not the user's line, otherwise None.

        For an op of stack-core this is the line of its public function, such as `stack_core.ops.linear`; inner frames
        belong to the dispatch of an implementation.
        """
        innermost = list(itertools.takewhile(lambda frame: frame.package == _OPS_PACKAGE, self.frames))[-1:]
        line = next(iter(innermost or self.frames), None)
        return None if line == self.source() else line

    @property
    def _traced(self) -> str | None:
        """Name of the compiled function."""
        return match[1] if (match := _TRACED.match(self.op_name)) else None

    @property
    def _inside(self) -> tuple[Frame, ...]:
        """Frames of the compiled function and of the functions it calls, its own frame last."""
        frames = self.frames[: max(len(self.frames) - self.outer, 0)]
        traced = [place for place, frame in enumerate(frames) if _function(frame) == self._traced]
        return frames[: traced[-1] + 1] if traced else frames


def called_by(stacks: Iterable[tuple[Frame, ...]], op_name: str) -> int:
    """Returns the number of outermost frames that surround the compiled function in all stacks of a program.

    Args:
      stacks: Python stacks of the program's instructions.
      op_name: name of any of its instructions; frames inside the function that it names belong to the program.
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
    """True if the class of a `__call__` is a layer, not part of the ops' machinery or a config such as an objective."""
    return frame.package != _OPS_PACKAGE and not name.endswith("Config")


def _function(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


_OPS_PACKAGE: Final = "stack_core"
_CALL: Final = re.compile(r"(\w+)\.__call__\b")
_TRACED: Final = re.compile(r"p?jit\(([^()]+)\)")
