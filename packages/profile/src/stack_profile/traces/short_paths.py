"""Short names of the user's files, relative to the program's working directory or to their package."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stack_profile.traces.instructions import Frame
from stack_profile.traces.trace import Trace

__all__ = ["ShortPaths", "short_paths"]

_DEEPEST: Final = 12  # folders of a package that are searched for `__init__.py`


class ShortPaths:
    """Replaces the absolute names of the user's files by short ones.

    A file in the working directory is named relative to it, another file relative to the folder of its package. Without
    either, its name stays absolute. Files of installed packages already have the names of their packages, see `Frame`.
    """

    def __init__(self, files: Iterable[str], directory: str) -> None:
        """Names `files`, absolute paths, for a program that ran in `directory`."""
        self._directory = directory.rstrip("/\\")
        self._names = {file: name for file in dict.fromkeys(files) if (name := self._short(file)) != file}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w./\\-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w./\\-])")

    def file(self, file: str) -> str:
        """Returns the short name of a file."""
        return self._names.get(file, file)

    def frame(self, frame: Frame) -> str:
        """Returns the short name of a frame's file."""
        return frame.path if frame.package else self.file(frame.file)

    def text(self, text: str) -> str:
        """Replaces all known files in a text, such as "/home/me/model.py:12"."""
        return self._pattern.sub(lambda match: self._names[match[0]], text) if self._names else text

    def _short(self, file: str) -> str:
        if self._directory and file.startswith((f"{self._directory}/", f"{self._directory}\\")):
            return file[len(self._directory) + 1 :]
        path = Path(file)
        package = path.parent
        for _ in range(_DEEPEST):
            if not (package / "__init__.py").is_file():
                break
            package = package.parent
        return path.relative_to(package).as_posix() if package != path.parent else file


def short_paths(trace: Trace) -> ShortPaths:
    """Names the files of programs that ran, of samples and of memory, relative to the captured process's directory.

    A trace that does not record the directory takes the current one.
    """
    frames = {frame for program in trace.ran for each in program.instructions.values() for frame in each.frames}
    frames |= {frame for each in trace.host_stacks if each for stack in each.stacks for frame in stack}
    frames |= {frame for each in (*trace.heaps, *trace.live) if each for stack in each.stacks for frame in stack.frames}
    files = sorted({frame.file for frame in frames if not frame.package})
    return ShortPaths(files, str(trace.about.get("directory") or Path.cwd()))
