"""Published addresses of processes that can be captured on demand: one file each, readable only by their user."""

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
    """Address of a listening process.

    Attributes:
      pid: process ID; 0 if unknown.
      port: port on the loopback interface.
      token: secret that each request must carry; whoever can read the address file can send requests.
      command: command line of the process.
      run: absolute path of the directory of the run that it computes, or "".
    """

    pid: int
    port: int
    token: str
    command: tuple[str, ...] = ()
    run: str = ""


def publish(address: Address) -> Path:
    """Writes an address to a file that only the user can read, and returns the file.

    Raises:
      CaptureError: the directory belongs to another user, or cannot be written.
    """
    path = _directory() / f"{address.pid}.json"
    try:
        forget(path)  # left by an earlier process with the same PID
        # The file must be new and private from the start, since it holds the token.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(address), file)
    except OSError as error:
        raise CaptureError(f"The address of this process cannot be written: {error}. Set XDG_RUNTIME_DIR.") from error
    return path


def addresses() -> dict[Path, Address]:
    """Returns the published addresses by file; their processes may have ended.

    Raises:
      CaptureError: the directory belongs to another user.
    """
    found = {}
    for path in sorted(_directory().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # the file is being written or was removed
            entry = json.loads(path.read_bytes())
            numbers = int(entry["pid"]), int(entry["port"])
            found[path] = Address(*numbers, str(entry["token"]), tuple(entry["command"]), str(entry.get("run", "")))
    return found


def forget(path: Path) -> None:
    """Removes a published address."""
    path.unlink(missing_ok=True)


def _directory() -> Path:
    """Returns the private directory of addresses: `$XDG_RUNTIME_DIR/stack-profile`, or one for temporary files."""
    # As the XDG specification demands, a relative path is ignored; so is an unset one.
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    path = base / "stack-profile" if base.is_absolute() else Path(tempfile.gettempdir(), f"stack-profile-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        # Without following links: another user could plant one in the shared temporary directory.
        about = path.lstat()
    except OSError as error:
        raise CaptureError(f"The directory of addresses cannot be made: {error}. Set XDG_RUNTIME_DIR.") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise CaptureError(
            f"{str(path)!r} must be your directory with mode 700, because its files give access to this process. "
            "Remove it, or set XDG_RUNTIME_DIR."
        )
    return path
