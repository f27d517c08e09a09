"""Rendezvous of the processes of a run: by settings, by the environment, and at the address of the first process.

JAX's coordinator aborts a process (SIGABRT) if another does not arrive. The processes therefore meet here first, where
that is an error with a message; afterwards the coordinator takes over the address.
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, TrainingError

__all__ = ["Place", "ProcessesConfig", "meet"]

_PORT = 8476
_RETRY_S = 0.05
_LINE_BYTES = 4096


@config
class ProcessesConfig:
    """The processes of one run and their meeting point. All processes start with the same config, except for `id`.

    Attributes:
      count: number of processes; None uses `JAX_NUM_PROCESSES`, or else 1.
      id: id of this process, from 0; None uses `JAX_PROCESS_ID`, or else SLURM's `SLURM_PROCID`.
      coordinator: "host:port" where the first process listens; None uses `JAX_COORDINATOR_ADDRESS`, or else SLURM's
        first host, or else this machine's loopback, 127.0.0.1:8476.
      start_timeout_s: maximum seconds to wait for all processes at the start.
      heartbeat_timeout_s: seconds of silence after which a process counts as dead and the run ends.
    """

    count: PositiveInt | None = None
    id: NonNegativeInt | None = None
    coordinator: str | None = None
    start_timeout_s: PositiveInt = 300
    heartbeat_timeout_s: PositiveInt = 100

    def resolved(self, environ: Mapping[str, str]) -> "Place":
        """Returns the settings with each None replaced from the environment.

        Raises:
          ConfigError: the id is missing or not below `count`, the address is malformed, or the count is missing.
        """
        known = self.count or _number(environ, "JAX_NUM_PROCESSES")
        if known is None and (given := [name for name in ("id", "coordinator") if getattr(self, name) is not None]):
            raise ConfigError(
                f"processes.{given[0]} is {getattr(self, given[0])!r}, but the number of processes is not set. Set "
                f"processes.count or JAX_NUM_PROCESSES, or leave processes.{given[0]} out."
            )
        count = known or 1
        if count == 1 and not self.id:
            return Place(0, 1, "", self.start_timeout_s, self.heartbeat_timeout_s)
        found = (self.id, _number(environ, "JAX_PROCESS_ID"), _number(environ, "SLURM_PROCID"))
        process = next((each for each in found if each is not None), None)
        if process is None:
            raise ConfigError(
                f"processes.count is {count}, but the id of this process is not set. Start each process with "
                f"--processes.id 0 to {count - 1} or JAX_PROCESS_ID, or start all with srun."
            )
        if process >= count:
            raise ConfigError(f"processes.id is {process}, but processes.count is {count}: ids are 0 to {count - 1}.")
        address = self.coordinator or environ.get("JAX_COORDINATOR_ADDRESS") or _slurm_address(environ)
        address = address or f"127.0.0.1:{_PORT}"
        host, separator, port = address.rpartition(":")
        if not separator or not host or not port.isdecimal():
            raise ConfigError(f"processes.coordinator is {address!r}; expected 'host:port', such as 10.0.0.1:{_PORT}.")
        return Place(process, count, address, self.start_timeout_s, self.heartbeat_timeout_s)


@dataclass(frozen=True)
class Place:
    """The position of one process in its run, with settings resolved."""

    id: int
    count: int
    coordinator: str
    start_timeout_s: int
    heartbeat_timeout_s: int

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def meet(place: Place) -> None:
    """Waits until all processes of the run have arrived.

    Raises:
      ConfigError: the first process cannot listen at the address, or ids or counts of processes conflict.
      TrainingError: some processes did not arrive in time; names them.
    """
    until_s = time.monotonic() + place.start_timeout_s
    if place.id == 0:
        _gather(place, until_s)
    else:
        _report(place, until_s)


def _gather(place: Place, until_s: float) -> None:
    """Listens until every process has arrived, then releases them all."""
    with contextlib.ExitStack() as opened:
        try:
            family = socket.AF_INET6 if ":" in place.address[0] else socket.AF_INET
            listener = opened.enter_context(socket.create_server(place.address, family=family, backlog=place.count))
        except OSError as error:
            raise ConfigError(
                f"Process 0 cannot listen at processes.coordinator {place.coordinator}: {error}. Is it this machine's "
                "address, and the port free? Another run on this machine needs another port."
            ) from error
        guests: dict[int, socket.socket] = {}
        while len(guests) < place.count - 1:
            missing = sorted({*range(1, place.count)}.difference(guests))
            try:
                # A timeout of 0 would make the socket non-blocking.
                listener.settimeout(max(until_s - time.monotonic(), 0.001))
                guest = opened.enter_context(listener.accept()[0])
                guest.settimeout(max(until_s - time.monotonic(), 0.001))
                hello = json.loads(guest.recv(_LINE_BYTES) or b"{}")
            except TimeoutError as error:
                raise TrainingError(
                    f"Process 0 waited {place.start_timeout_s} s at {place.coordinator} for {place.count - 1} others; "
                    f"missing: {', '.join(map(str, missing))}. Start them, with this address as processes.coordinator."
                ) from error
            except (OSError, ValueError):  # the connection is not from a process of a run
                continue
            if not isinstance(hello, dict) or "id" not in hello:
                continue
            if hello["id"] not in missing or hello.get("count") != place.count:
                problem = (
                    f"Process {hello['id']} of {hello.get('count')} connected to {place.coordinator}, which expects "
                    f"{place.count} processes and waits for {', '.join(map(str, missing))}. "
                    "Give each process its own id, and all the same processes.count."
                )
                # Every process ends with the same message instead of its own timeout.
                for each in (*guests.values(), guest):
                    _say(each, problem)
                raise ConfigError(problem)
            guests[hello["id"]] = guest
        listener.close()  # frees the address for JAX's coordinator
        for guest in guests.values():
            _say(guest, "")


def _report(place: Place, until_s: float) -> None:
    """Connects to the first process and waits for the release."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(place.address, timeout=1.0) as host:
            host.sendall(json.dumps({"id": place.id, "count": place.count}).encode())
            host.settimeout(max(until_s - time.monotonic(), 0.001))
            if answer := host.recv(_LINE_BYTES):
                problem = json.loads(answer)["problem"]
                break
        if time.monotonic() > until_s:
            raise TrainingError(
                f"Process {place.id} waited {place.start_timeout_s} s for process 0 at processes.coordinator "
                f"{place.coordinator}, which did not admit it. Start process 0 there, or correct the address."
            )
        time.sleep(_RETRY_S)
    if problem:
        raise ConfigError(problem)
    while time.monotonic() < until_s:  # JAX waits a second if the coordinator does not listen yet
        with contextlib.suppress(OSError), socket.create_connection(place.address, timeout=1.0):
            return
        time.sleep(_RETRY_S)


def _say(guest: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        guest.sendall(json.dumps({"problem": problem}).encode())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is not None and not value.isdecimal():
        raise ConfigError(f"The environment variable {name} is {value!r}; expected a number.")
    return None if value is None else int(value)


def _slurm_address(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of a SLURM step ("node[003-007,9]" for several) with a port that depends on the job."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    found = re.match(r"([^,\[]*)(?:\[([^,\-\]]*)[^\]]*\]([^,]*))?", nodes)
    first = "".join(part or "" for part in found.groups()) if found else nodes
    # Jobs that share a host get different ports.
    return f"{first}:{_PORT + int(environ.get('SLURM_JOB_ID', '0')) % 4096}"
