"""Access to files of documents: globs, text and change detection."""

import glob
import hashlib
import itertools
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from stack_core.abi.errors import DataError
from stack_core.abi.local_paths import local_path

__all__ = ["expand_glob", "listing", "matching", "read_text", "stat_digest"]

_LISTED = 10


def expand_glob(pattern: str, scheme: str) -> tuple[Path, ...]:
    """Returns the files that match a glob, sorted.

    `**` matches any number of folders, `{a,b}` either text, and `~` is the home directory.

    Args:
      pattern: the glob.
      scheme: scheme of the data source, for messages.

    Raises:
      DataError: the pattern is empty, matches nothing, or matches only folders.
    """
    if not pattern:
        raise DataError(f"Source '{scheme}:' lacks its glob. Write for example '{scheme}:data/**/*'.")
    matches = sorted(Path(match).absolute() for match in matching(pattern))
    files = tuple(path for path in matches if not path.is_dir())
    if not files:
        found = f"{len(matches)} folder(s) but no file" if matches else "nothing"
        raise DataError(
            f"Glob {pattern!r} of source '{scheme}:{pattern}' matches {found}; relative paths start at "
            f"{str(Path.cwd())!r}. Correct the path; '**' descends into folders, as in 'data/**/*.{{md,rst}}'."
        )
    return files


def matching(pattern: str) -> list[str]:
    """Returns the files and folders that match a glob, unsorted; the list may be empty.

    `*.{md,rst}` matches either ending, as in a shell.
    """
    # `Path.glob` does not support absolute patterns. A name may contain the braces themselves.
    found = [glob.glob(str(local_path(each)), recursive=True) for each in (pattern, *_alternatives(pattern))]  # noqa: PTH207
    return list(dict.fromkeys(itertools.chain(*found)))


def _alternatives(pattern: str) -> list[str]:
    """Returns a pattern with each choice of its braces; [] without braces."""
    braces = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if braces is None:
        return []
    chosen = [pattern[: braces.start()] + each + pattern[braces.end() :] for each in braces[1].split(",")]
    return [found for each in chosen for found in _alternatives(each) or [each]]


def listing(lines: Sequence[str]) -> str:
    """Returns the first ten lines, indented for a message, and the number of the others."""
    more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "\n  ".join(lines[:_LISTED]) + more


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file with its original line endings.

    Raises:
      DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise undecodable(str(path), error) from error


def stat_digest(files: Iterable[tuple[str, Path]], settings: Sequence[str] = ()) -> str:
    """Returns a digest of every file's name, size and modification time, and of `settings`.

    Raises:
      DataError: a file is missing, or is a socket, a pipe or a device.
    """
    digest = hashlib.sha256(repr(tuple(settings)).encode())
    for name, path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{str(path)!r} is not a regular file. Leave it out of the source's glob.")
        # Paths may hold bytes that are not UTF-8.
        digest.update(repr((name, status.st_size, status.st_mtime_ns)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be read."""
    return DataError(
        f"Cannot read {str(path)!r}: {error.strerror or error}. Make it readable, or leave it out of the source's glob."
    )


def undecodable(name: str, error: UnicodeDecodeError) -> DataError:
    """Returns the error for a file that is not UTF-8."""
    given = error.object[error.start : error.start + 1]
    return DataError(
        f"{name!r} is not UTF-8 text: byte {error.start} is 0x{given.hex()} ({error.reason}). "
        "Convert it to UTF-8, or leave it out of the source's glob."
    )
