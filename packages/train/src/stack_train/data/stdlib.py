"""The source `stdlib`: the Python standard library of the running interpreter, a corpus present on every machine."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_train.data.files import read_text, stat_digest

__all__ = ["StdlibSource"]

_EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib2to3", "site-packages", "test", "tests"}
)


class StdlibSource:
    """The `.py` files of the standard library without tests and installed packages; about 11 MB in 600 files.

    Raises:
      DataError: the source has an address, or the interpreter comes without source files (embedded or zipped).
    """

    def __init__(self, address: str = "") -> None:
        if address:
            raise DataError(f"Source 'stdlib' takes no address, but 'stdlib:{address}' was given. Write 'stdlib'.")
        self._root = Path(sysconfig.get_path("stdlib"))
        self._paths = sorted(filter(self._included, self._root.rglob("*.py")))
        if not self._paths:
            raise DataError(
                f"The standard library at {str(self._root)!r} holds no .py files. "
                "Use an interpreter that includes its source files, or another source such as 'text:GLOB'."
            )

    def documents(self) -> Iterator[Document]:
        for path in self._paths:
            yield Document(self._name(path), read_text(path))

    def fingerprint(self) -> str:
        return stat_digest((self._name(path), path) for path in self._paths)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _included(self, path: Path) -> bool:
        return _EXCLUDED_FOLDERS.isdisjoint(path.relative_to(self._root).parts[:-1])
