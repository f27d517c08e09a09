"""Where processes that can be captured on demand are found: a file each, which only their user can read."""

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stack_profile.errors import CaptureError

__all__ = ["Address", "addresses", "forget", "publish"]


@dataclass(frozen=True)
class Address:
    """A process that listens.

    Attributes:
      port: on the loopback interface.
      token: what each request must carry; who can read this file may ask.
      command: what the process was started with.
    """

    pid: int
    port: int
    token: str
    command: tuple[str, ...] = ()


def publish(address: Address) -> Path:
    """Writes an address for the user alone; returns its file.

    Raises:
      CaptureError: the directory is another's, or cannot be written.
    """
    path = _directory() / f"{address.pid}.json"
    try:
        forget(path)  # that of a process which had this number before
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(address), file)
    except OSError as error:
        raise CaptureError(f"The address of this process cannot be written: {error}. Set XDG_RUNTIME_DIR.") from error
    return path


def addresses() -> dict[Path, Address]:
    """What was published and not taken back, by file; the processes may have ended.

    Raises:
      CaptureError: the directory is another's.
    """
    found = {}
    for path in sorted(_directory().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # it is being written, or gone
            entry = json.loads(path.read_bytes())
            found[path] = Address(int(entry["pid"]), int(entry["port"]), str(entry["token"]), tuple(entry["command"]))
    return found


def forget(path: Path) -> None:
    """Takes an address back."""
    path.unlink(missing_ok=True)


def _directory() -> Path:
    """`$XDG_RUNTIME_DIR/stack-profile`, or one in the directory for temporary files; nobody else may enter it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    path = base / "stack-profile" if base.is_absolute() else Path(tempfile.gettempdir(), f"stack-profile-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        about = path.lstat()
    except OSError as error:
        raise CaptureError(f"The directory of addresses cannot be made: {error}. Set XDG_RUNTIME_DIR.") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise CaptureError(
            f"{str(path)!r} would tell others how to reach this process: it must be a directory of yours that nobody "
            "else may enter (mode 700). Remove it, or set XDG_RUNTIME_DIR."
        )
    return path
