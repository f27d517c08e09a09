"""`stack profile attach`: captures running processes that listen for requests."""

import dataclasses
import itertools
import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_profile.captures.addresses import Address
from stack_profile.captures.attach import Attached, attachable, find_processes
from stack_profile.captures.attach import attach as attach_to
from stack_profile.captures.stacks import STACKS_HZ
from stack_profile.errors import CaptureError

__all__ = ["attach"]


def attach(
    *processes: str,
    out: Path = Path("profile"),
    duration_s: float = 5.0,
    name: str | None = None,
    host_tracer_level: int = 2,
    stacks_hz: float = STACKS_HZ,
    port: int | None = None,
    token: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Capture running processes; without a name, list listening processes.

    Processes listen if started with `stack profile run --listen`, with `profile: {listen: true}`, or if they call
    stack_profile.listen().

    Args:
      processes: process IDs, directories of runs with all their processes on this machine, or addresses of servers
        such as 127.0.0.1:8000; several make one trace.
      out: directory of the capture, which the processes write.
      duration_s: seconds to capture.
      name: name of the capture, by default the time.
      host_tracer_level: 1, 2 or 3: level of detail on the host.
      stacks_hz: samples of the threads' Python stacks per second; 0 for none.
      port: port of a process on this machine whose address is not found, with --token.
      token: token of this process.
      json: print machine-readable results.
    """
    if (port is None) != (token is None) or (port is not None and processes):
        raise CaptureError("--port and --token go together and name one process; give both, or name processes.")
    if port is not None and token is not None:
        targets: Sequence[Address] = [Address(0, port, token)]
    elif processes:
        targets = list(dict.fromkeys(itertools.chain.from_iterable(map(find_processes, processes))))
    else:
        _list(attachable(), json=json)
        return
    levels = {"host_tracer_level": host_tracer_level, "stacks_hz": stacks_hz}
    results = attach_to(targets, out=out, duration_s=duration_s, name=name, **levels)
    _report(results, json=json)


def _list(found: Sequence[Address], *, json: bool) -> None:
    if json:
        processes = [{"pid": address.pid, "port": address.port, "command": address.command} for address in found]
        print(json_format.dumps(processes, indent=2))
    elif not found:
        print("No process of yours listens. Start one with `stack profile run --listen script.py`.")
    else:
        print("\n".join(f"{address.pid}  {' '.join(address.command)}" for address in found))


def _report(results: Sequence[Attached], *, json: bool) -> None:
    if json:
        print(json_format.dumps([dataclasses.asdict(result) for result in results], indent=2, default=str))
    else:
        for result in (result for result in results if result.path is not None):
            print(f"{result.path}{f' (partial: {result.partial})' if result.partial else ''}")
    if failures := [result for result in results if result.problem is not None]:
        raise CaptureError("\n".join(f"{_called(result)} was not captured: {result.problem}" for result in failures))


def _called(result: Attached) -> str:
    return f"Process {result.pid}" if result.pid else "The process"
