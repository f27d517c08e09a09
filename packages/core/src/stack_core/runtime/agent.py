"""The agent of a host: forks workers, watches them, and reports to the driver. `python -m stack_core.runtime.agent`.

It imports the modules that workers need and connects to the driver. If the connection is lost, it keeps redialing for
`orphan_s` seconds, during which another driver can attach. It has one thread, since only a single-threaded process
forks safely, and never blocks on the driver or on a worker.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stack_core.abi.errors import StackError
from stack_core.abi.launchers import Invitation
from stack_core.runtime.channel import ChannelClosed, Link, Message, dial
from stack_core.runtime.config import parsed_address
from stack_core.runtime.versions import installed
from stack_core.runtime.worker import Order, work
from stack_core.runtime.zygote import Child, die_with_parent, fork, state_of

__all__ = ["Agent", "imported", "invitation_json", "main", "prepared"]

_REDIAL_S = 0.2
_LOOK_S = 0.25  # interval between checks of the workers' states
_PORTS = range(20_000, 32_000)  # below the kernel's range for outgoing connections
_MOST_LOG_BYTES = 1 << 20


@dataclass
class _Worker:
    """A worker of this host with its latest report."""

    order: Order
    child: Child
    unread: bytearray = field(default_factory=bytearray)
    report: dict[str, Any] = field(default_factory=dict)
    stopped_since_s: float | None = None


class Agent:
    """The server loop of an agent, for successive drivers, until it is released or orphaned for too long."""

    def __init__(self, invitation: Invitation, report: Mapping[str, Any]) -> None:
        self._invitation = invitation
        self._description = dict(report)
        self._number = invitation.host
        self._preloaded = list(invitation.preload)
        self._address = parsed_address(invitation.address)
        self._token = bytes.fromhex(invitation.token)
        self._selector = selectors.DefaultSelector()
        self._link: Link | None = None
        self._workers: dict[int, _Worker] = {}  # by pid
        self._orphaned_since_s = time.monotonic()
        self._look_s = 0.0
        self._leaving = False
        self.refusal: str | None = None
        self._commands: dict[str, Callable[[Any], None]] = {
            "end": self._end,
            "exit": self._exit,
            "fork": self._fork,
            "numbered": self._set_number,
            "ping": self._ping,
            "port": self._port,
            "preload": self._preload,
            "refused": self._take_refusal,
            "signal": self._signal,
        }

    def serve(self) -> None:
        """Serves until the driver requests the exit or was absent for `orphan_s`; no worker is left afterwards."""
        try:
            while not self._leaving:
                if self._link is None:
                    self._dial()
                for key, _ in self._selector.select(_REDIAL_S if self._link is None else _LOOK_S):
                    if key.fd in self._selector.get_map():  # an earlier callback may have closed it
                        key.data()
                self._look()
                self._write()
        finally:
            self._end_workers(None)

    def _dial(self) -> None:
        try:
            link = dial(self._address, self._token)
        except (OSError, ChannelClosed) as error:
            if time.monotonic() - self._orphaned_since_s > self._invitation.orphan_s:
                self.refusal = f"No driver was at {self._invitation.address} for {self._invitation.orphan_s} s: {error}"
                self._leaving = True
            return
        self._link = link
        self._selector.register(link, selectors.EVENT_READ, self._read)
        hello = {
            **self._description,
            "host": self._number,
            "preloaded": self._preloaded,
            "pid": os.getpid(),
            "name": socket.gethostname(),
        }
        # Workers on other hosts reach this host at the address of this connection, too.
        hello["at"] = link.socket.getsockname()[0]
        self._tell(hello={"role": "agent", **hello, "workers": [worker.report for worker in self._workers.values()]})

    def _read(self) -> None:
        assert self._link is not None, "registered with it"
        try:
            for message in self._link.read():
                self._obey(message)
        except ChannelClosed:
            self._lose_driver()

    def _write(self) -> None:
        if self._link is not None:
            try:
                self._link.flush()
            except ChannelClosed:
                self._lose_driver()

    def _lose_driver(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None
            self._orphaned_since_s = time.monotonic()

    def _tell(self, **message: Any) -> None:
        """Sends a message to the driver. Without a driver, the workers' state is kept for the next one."""
        if self._link is None:
            return
        try:
            self._link.send(message)
        except ChannelClosed:
            self._lose_driver()

    def _obey(self, message: Message) -> None:
        """Executes the commands of a message by name; unknown commands are ignored."""
        for name, value in message.items() if isinstance(message, dict) else ():
            if name in self._commands:
                self._commands[name](value)

    def _ping(self, number: float) -> None:
        self._tell(pong=number, steps={str(pid): worker.report.get("step") for pid, worker in self._workers.items()})

    def _port(self, request: Any) -> None:
        self._tell(port=_free_port(self._link), ask=request)

    def _end(self, formation: int) -> None:
        self._end_workers(formation)
        self._tell(ended=formation)

    def _preload(self, modules: list[str]) -> None:
        self._tell(preloaded=imported(modules))
        self._preloaded += modules

    def _set_number(self, number: int) -> None:
        self._number = number

    def _take_refusal(self, reason: str) -> None:
        self.refusal = reason

    def _exit(self, request: Any) -> None:
        self._leaving = True

    def _fork(self, fields: dict[str, Any]) -> None:
        order = Order(**fields)
        child = fork(lambda out: work(order, out, (self._address, self._token)))
        report = {"formation": order.formation, "rank": order.rank, "pid": child.pid, "status": "running"}
        # A driver that attaches later needs only the reports of the latest formation.
        self._workers = {pid: each for pid, each in self._workers.items() if each.order.formation == order.formation}
        worker = self._workers[child.pid] = _Worker(order, child, report=report)
        self._selector.register(child.messages, selectors.EVENT_READ, lambda: self._hear(worker))
        self._selector.register(child.printed, selectors.EVENT_READ, lambda: self._log(worker))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._bury(worker))
        self._tell(worker=report)

    def _hear(self, worker: _Worker) -> None:
        data = _read_all(worker.child.messages)
        if data is None:
            self._forget(worker.child.messages)
            return
        worker.unread += data
        *lines, rest = worker.unread.split(b"\n")
        worker.unread = bytearray(rest)
        for line in lines:
            with contextlib.suppress(ValueError):  # a worker killed while writing leaves an incomplete line
                self._note(worker, json.loads(line))

    def _note(self, worker: _Worker, message: dict[str, Any]) -> None:
        """Stores the state that a newly attached driver needs; forwards the rest to the current driver."""
        report = worker.report
        report.update({key: message[key] for key in ("result", "error") if key in message})
        if "step" in message:
            report["step"] = message["step"]
        event = message.get("event")
        if event is not None:
            if event["event"] == "RunStarted":
                report["started"] = event
            self._tell(event=event, formation=worker.order.formation, rank=worker.order.rank)
        elif "step" in message:
            if message["completed"] and worker.order.rank == 0:
                self._tell(step=message["step"], formation=worker.order.formation, rank=worker.order.rank)
        elif "say" in message:
            self._tell(say=message["say"], formation=worker.order.formation, rank=worker.order.rank)
        else:
            self._tell(worker=report)

    def _log(self, worker: _Worker) -> None:
        data = _read_all(worker.child.printed)
        if data is None:
            self._forget(worker.child.printed)
        # Output is dropped if the driver reads too slowly: the agent must neither block nor grow.
        elif self._link is not None and self._link.waiting_bytes < _MOST_LOG_BYTES:
            text = data.decode(errors="replace")
            self._tell(log=text, formation=worker.order.formation, rank=worker.order.rank)

    def _bury(self, worker: _Worker) -> None:
        """Reads the remaining output of a worker that has ended, and reports its exit status."""
        _, status = os.waitpid(worker.child.pid, 0)
        for descriptor, take in ((worker.child.messages, self._hear), (worker.child.printed, self._log)):
            if descriptor in self._selector.get_map():
                take(worker)
        code = os.waitstatus_to_exitcode(status)
        worker.report.update(status="done" if code == 0 and "result" in worker.report else "dead", exit_status=code)
        for descriptor in (worker.child.messages, worker.child.printed, worker.child.pidfd):
            self._forget(descriptor)
        worker.child.close()
        self._tell(worker=worker.report)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _look(self) -> None:
        """Checks which workers are stopped by a signal."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        for worker in self._alive():
            if state_of(worker.child.pid) != "T":
                if worker.report.pop("stopped_s", None) is not None:
                    self._tell(worker=worker.report)
                worker.stopped_since_s = None
                continue
            worker.stopped_since_s = worker.stopped_since_s or now_s
            worker.report["stopped_s"] = now_s - worker.stopped_since_s
            self._tell(worker=worker.report)

    def _alive(self, formation: int | None = None) -> list[_Worker]:
        return [
            worker
            for worker in self._workers.values()
            if worker.report["status"] == "running" and formation in (None, worker.order.formation)
        ]

    def _signal(self, which: dict[str, int]) -> None:
        for worker in self._alive(which["formation"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.child.pid, which["number"])

    def _end_workers(self, formation: int | None) -> None:
        """Kills the workers of a formation, or all workers, and reaps them."""
        doomed = self._alive(formation)
        for worker in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.child.pid, signal.SIGKILL)
        for worker in doomed:
            self._bury(worker)
        self._workers = {pid: worker for pid, worker in self._workers.items() if worker not in doomed}


def _read_all(descriptor: int) -> bytes | None:
    """Returns the current content of a pipe; None at its end."""
    parts = []
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            break
        if not data:
            # The end of the pipe is reported by the next call if content came before.
            return b"".join(parts) or None
        parts.append(data)
    return b"".join(parts)


def _free_port(link: Link | None) -> int:
    """Returns a free port of this host outside the kernel's range for outgoing connections."""
    host = link.socket.getsockname()[0] if link is not None else "127.0.0.1"
    while True:
        # At random, because several agents of one machine choose at the same time.
        port = random.choice(_PORTS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
            return port


def prepared(preload: tuple[str, ...]) -> dict[str, Any]:
    """Imports the modules that workers need; returns the facts of this host, with a failed import under "problem"."""
    problem = imported(preload)
    return {**installed(), "problem": problem}


def imported(modules: Sequence[str]) -> str | None:
    """Imports modules for all workers forked from now on; returns an error message, or None."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything; the error is reported to the driver
            return f"it cannot import {module}: {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # avoids copy-on-write of shared pages by the collector
    return None


def main() -> None:
    """Reads an invitation as JSON from standard input and serves."""
    parent = os.getppid()
    fields: dict[str, Any] = json.loads(sys.stdin.readline())
    fields["preload"] = tuple(fields.get("preload", ()))
    invitation = Invitation(**fields)
    if invitation.follows_parent:
        die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and forwards it to the workers
    agent = Agent(invitation, prepared(invitation.preload))
    try:
        agent.serve()
    except StackError as error:
        sys.exit(f"stack agent: {error}")
    if agent.refusal:
        sys.exit(f"stack agent: {agent.refusal}")


def invitation_json(invitation: Invitation) -> str:
    """Returns the line that an agent reads from standard input."""
    return json.dumps(asdict(invitation)) + "\n"


if __name__ == "__main__":
    main()
