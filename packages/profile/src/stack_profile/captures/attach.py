"""Captures other processes that listen (`stack_profile.listen`, `stack profile run --listen`)."""

import contextlib
import http.client
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from stack_core.abi.config import parse
from stack_profile.captures.addresses import Address, addresses, forget
from stack_profile.captures.listener import LOOPBACK, CaptureRequest
from stack_profile.captures.stacks import STACKS_HZ
from stack_profile.errors import CaptureError

__all__ = ["Attached", "address_of", "attach", "attachable", "find_processes"]

_PING_S: Final = 2.0
_WRITE_S: Final = 300.0  # enough to encode and write a capture of hours


@dataclass(frozen=True)
class Attached:
    """Result of capturing one process.

    Attributes:
      pid: process ID.
      path: the trace's file; None if the capture failed.
      partial: reason why the trace is shorter than requested; None for a complete trace.
      problem: reason why the capture failed; None after a success.
    """

    pid: int
    path: Path | None = None
    partial: str | None = None
    problem: str | None = None


def attachable() -> list[Address]:
    """Returns the listening processes of this user, and removes the addresses of processes that ended.

    Raises:
      CaptureError: the directory of addresses belongs to another user.
    """
    found = []
    for path, address in addresses().items():
        try:
            _ask(address, "GET", timeout_s=_PING_S)
        except TimeoutError:
            pass  # the process is stopped or busy, and may answer later
        except (OSError, http.client.HTTPException, CaptureError):
            forget(path)
            continue
        found.append(address)
    return found


def address_of(pid: int) -> Address:
    """Returns the address that a process published.

    Raises:
      CaptureError: the process does not listen or does not exist.
    """
    listening = {address.pid: address for address in attachable()}
    if pid not in listening:
        others = ", ".join(map(str, sorted(listening))) or "none"
        raise CaptureError(
            f"No process {pid} of yours listens; listening processes: {others}. Start it with "
            "`stack profile run --listen`, `profile: {listen: true}` in a run, or stack_profile.listen()."
        )
    return listening[pid]


def find_processes(text: str) -> list[Address]:
    """Returns the addresses of listening processes by their number, run or server; a run or server may have several.

    Args:
      text: a process ID, a directory, or an address such as "127.0.0.1:8000" or "http://localhost:8000/v1".

    Raises:
      CaptureError: no listening process matches.
    """
    if text.isdecimal():
        return [address_of(int(text))]
    listening = attachable()
    match = _SERVER.fullmatch(text)
    if match:
        found = [each for each in listening if _serves(each.pid, int(match[1]))]
    else:
        found = [each for each in listening if each.run and each.run == str(Path(text).resolve())]
    if not found:
        listed = "; ".join(f"{each.pid} ({each.run or ' '.join(each.command)})" for each in listening) or "none"
        raise CaptureError(
            f"{text!r} is not the ID of a listening process, the directory of a listening run, or the address of a "
            f"listening server on this machine. Listening processes: {listed}. Start one with "
            "`stack profile run --listen`."
        )
    return found


_SERVER: Final = re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\]):(\d+)(?:/.*)?")
_LISTENS: Final = "0A"  # state of a socket


def _serves(pid: int, port: int) -> bool:
    """Returns whether a process listens on a TCP port, which only Linux shows."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
    files: set[str] = set()
    with contextlib.suppress(OSError):  # the process has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                files.add(str(file.readlink()))
    return bool(files & sockets)


def attach(
    targets: Sequence[Address],
    *,
    out: Path,
    duration_s: float = 5.0,
    name: str | None = None,
    host_tracer_level: int = 2,
    stacks_hz: float = STACKS_HZ,
) -> list[Attached]:
    """Captures processes at the same time and under one name, which makes them one trace, and waits for the results.

    Args:
      targets: addresses of the processes.
      out: directory that the processes can write.
      duration_s: seconds to capture.
      name: name of the capture, by default the time.
      host_tracer_level, stacks_hz: see `stack_profile.capture`.

    Raises:
      ConfigError: `name` is not a file name, or `duration_s` is not positive or over a day.
    """
    request = {
        "out": str(out.resolve()),
        "name": name or datetime.now().astimezone().strftime("%Y_%m_%d_%H_%M_%S_%f"),
        "duration_s": duration_s,
        "host_tracer_level": host_tracer_level,
        "stacks_hz": stacks_hz,
    }
    # Validated here, before any process starts to record.
    parse(CaptureRequest, request)
    # All at once, so the captures cover the same time; an executor needs one worker at least.
    with ThreadPoolExecutor(max_workers=max(len(targets), 1)) as together:
        return list(together.map(lambda address: _attached(address, request), targets))


def _attached(address: Address, request: Mapping[str, Any]) -> Attached:
    try:
        answer = _ask(address, "POST", request, timeout_s=request["duration_s"] + _WRITE_S)
        return Attached(address.pid, Path(answer["path"]), answer["partial"])
    except ConnectionRefusedError:
        problem = (
            f"Nothing listens on port {address.port} of {LOOPBACK}: the process has ended, or the port is another's."
        )
    except TimeoutError:
        problem = f"It has not answered for {request['duration_s'] + _WRITE_S:g} s."
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        problem = f"The process ended while it was captured, or is none that listens for this: {error!r}"
    except CaptureError as error:
        problem = str(error)
    return Attached(address.pid, problem=problem)


def _ask(
    address: Address, method: str, content: Mapping[str, Any] | None = None, *, timeout_s: float
) -> dict[str, Any]:
    """Sends a request to a process and returns its answer.

    Raises:
      CaptureError: the process refuses the request.
      OSError, HTTPException, ValueError: the process is gone, or the port belongs to another program.
    """
    connection = http.client.HTTPConnection(LOOPBACK, address.port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {address.token}"}
        connection.request(method, "/", None if content is None else json.dumps(content).encode(), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise CaptureError(answer["error"])
    return answer
