"""The driver's side of a cluster: accepts connections of agents, tracks them, and collects their messages."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stack_core.abi.errors import ClusterError, ConfigError
from stack_core.abi.launchers import Invitation, Launcher
from stack_core.runtime.channel import ChannelClosed, Link, Message
from stack_core.runtime.config import ClusterConfig, parsed_address
from stack_core.runtime.versions import differing, installed

__all__ = ["Host", "Hosts"]

_GREETING_S = 10.0
_MOST_STRANGERS = 64
_STALL_S = 1.0
_TURN_S = 0.1


@dataclass
class Host:
    """One host, represented by its agent.

    Attributes:
      number: number of the host in the cluster.
      link: connection to the agent.
      pid: process id of the agent.
      name: name of the machine.
      at: address of the host on its connection to the driver, at which other hosts reach it too.
      workers: the agent's reports about its workers at connection time.
      heard_s: time of its agent's last message, by the monotonic clock.
      imports_until_s: time until which the agent may be silent while it imports additional modules, or None.
    """

    number: int
    link: Link
    pid: int
    name: str
    at: str
    workers: list[dict[str, Any]] = field(default_factory=list)
    heard_s: float = 0.0
    imports_until_s: float | None = None


class Hosts:
    """All hosts of a cluster.

    Args:
      count: expected number of hosts.
      address: requested listening address; the attribute `address` is the actual one.

    Attributes:
      misfits: reasons why agents were refused.
      strangers: number of connections that did not authenticate as an agent or worker.

    Raises:
      ConfigError: the driver cannot listen at the address.
    """

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        token: bytes,
        *,
        count: int,
        address: str | None = None,
        preload: Collection[str] = (),
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._token = token
        self._preload = tuple(preload)
        self._selector = selectors.DefaultSelector()
        self._listener = _listening(parsed_address(address or config.address))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.count = count
        self.present: dict[int, Host] = {}
        self.strangers = 0
        self.misfits: list[str] = []
        self.arrivals: list[tuple[dict[str, Any], Link]] = []
        self._facts = installed()
        self._greeting: dict[Link, float] = {}
        self._told: list[dict[str, Any]] = []
        self._launched: set[int] = set()  # hosts whose agents have not connected yet
        self._polled_s = self._pinged_s = time.monotonic()

    def start(self, numbers: Collection[int]) -> None:
        """Starts agents and returns when all are connected.

        Raises:
          ClusterError: some did not connect within `start_s`, or a host is incompatible; names each.
        """
        self.misfits.clear()  # discard refusals of hosts that connected uninvited
        self._launch(numbers)
        self.wait_for(numbers, self._config.start_s)

    def launch_missing(self) -> list[int]:
        """Starts the agents of all hosts that are neither connected nor about to connect; returns their numbers."""
        missing = [number for number in range(self.count) if number not in self.present]
        failed = [number for number in missing if number in self._launched and self._launcher.problem(number)]
        for number in failed:
            self._launcher.end(number, None)
        numbers = [number for number in missing if number not in self._launched or number in failed]
        self._launch(numbers)
        return numbers

    def gather(self, is_enough: Callable[[int], bool], awaited: Collection[int], wait_s: float) -> list[int]:
        """Waits until enough hosts are connected, and then up to `wait_s` for the rest.

        Messages received meanwhile are kept for `poll`.

        Args:
          is_enough: whether a number of hosts suffices; must hold for all larger numbers too.
          awaited: hosts to wait for when enough are connected.

        Returns:
          The hosts that are still missing.

        Raises:
          ClusterError: not enough hosts connected within `start_s`, or too many agents cannot start.
        """
        self.misfits.clear()
        began_s, enough_s = time.monotonic(), None
        deferred: list[dict[str, Any]] = []
        while True:
            now_s = time.monotonic()
            missing = [number for number in range(self.count) if not self._is_there(number)]
            problems = {number: problem for number in missing if (problem := self._launcher.problem(number))}
            if is_enough(self.count - len(missing)):
                enough_s = now_s if enough_s is None else enough_s
                if now_s - enough_s >= wait_s or not set(awaited) & (set(missing) - set(problems)):
                    break
            elif not is_enough(self.count - len(problems)):
                listing = "\n".join(f"host {number}: {problem}" for number, problem in problems.items())
                raise ClusterError(f"Too many agents cannot start.\n{listing}")
            elif now_s - began_s > self._config.start_s:
                raise self._absence(missing, self._config.start_s)
            else:
                enough_s = None  # a host was lost again
            deferred += self.poll(_TURN_S)
        self._told = deferred + self._told
        return missing

    @property
    def ready(self) -> tuple[int, ...]:
        """The connected hosts that have imported all modules, in ascending order."""
        return tuple(number for number in sorted(self.present) if self._is_there(number))

    def _launch(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._launcher.start(number, self.invitation(number))
        self._launched.update(numbers)

    def invitation(self, number: int | None) -> Invitation:
        return Invitation(self.address, self._token.hex(), number, self._config.orphan_s, self._preload)

    def wait_for(self, numbers: Collection[int], timeout_s: float) -> None:
        """Waits until the agents of these hosts are connected; messages received meanwhile are kept for `poll`."""
        until_s = time.monotonic() + timeout_s
        deferred: list[dict[str, Any]] = []
        while missing := [number for number in numbers if not self._is_there(number)]:
            deferred += self.poll(_TURN_S)
            if self.misfits:
                raise ClusterError("\n".join(self.misfits))
            problems = [f"host {each}: {problem}" for each in missing if (problem := self._launcher.problem(each))]
            if problems:
                raise ClusterError("An agent cannot start. " + "\n".join(problems))
            if time.monotonic() > until_s:
                raise self._absence(missing, timeout_s)
        self._told = deferred + self._told

    def _absence(self, missing: Collection[int], waited_s: float) -> ClusterError:
        strangers = f" {self.strangers} connections were of no agent that holds the token." if self.strangers else ""
        return ClusterError(
            f"Hosts {', '.join(map(str, missing))} of {self.count} did not come to {self.address} in "
            f"{waited_s:g} s.{strangers} Look whether their agents run and reach this address, or raise "
            "cluster.start_s." + "".join(f"\n{misfit}" for misfit in self.misfits)
        )

    def poll(self, timeout_s: float) -> list[dict[str, Any]]:
        """Returns messages of agents since the last call, each with its "host"; a lost host gives {"lost": reason}."""
        told, self._told = self._told, list[dict[str, Any]]()
        for key, _ in self._selector.select(0 if told else timeout_s):
            if key.fd in self._selector.get_map():
                key.data()
        self._look_after()
        told += self._told
        self._told = []
        return told

    def tell(self, number: int, **message: Any) -> None:
        """Sends a message to the agent of a host; `poll` reports a lost host."""
        host = self.present.get(number)
        if host is None:
            return
        try:
            host.link.send(message)
        except ChannelClosed as error:
            self._lose(host, str(error))

    def ask(self, number: int, question: str, timeout_s: float = 10.0) -> Any:
        """Returns an agent's answer to `{question: ...}`; other messages are kept for `poll`.

        Raises:
          ClusterError: the host is gone, or does not answer.
        """
        until_s = time.monotonic() + timeout_s
        self.tell(number, **{question: True})
        deferred: list[dict[str, Any]] = []
        try:
            while time.monotonic() < until_s and number in self.present:
                for message in self.poll(_TURN_S):
                    if message["host"] == number and "ask" in message:
                        return message[question]
                    deferred.append(message)
        finally:
            self._told = deferred + self._told
        raise ClusterError(f"Host {number} is gone or does not answer.")

    def end(self, number: int) -> None:
        """Kills an agent and thereby its workers."""
        host = self.present.get(number)
        self._launcher.end(number, host.pid if host else None)
        if host is not None:
            self._forget(host)

    def close(self, *, exit_agents: bool = True) -> None:
        """Requests all agents to exit, waits, and kills the remaining agents."""
        if exit_agents:
            pids = {number: host.pid for number, host in self.present.items()}
            for number in pids:
                self.tell(number, exit=True)
            until_s = time.monotonic() + 5.0
            while self.present and time.monotonic() < until_s:
                self.poll(_TURN_S)
            for number in tuple(self.present):
                self._launcher.end(number, pids[number])
        for host in tuple(self.present.values()):
            self._forget(host)
        for link in tuple(self._greeting):
            self._drop(link)
        self._selector.close()
        for each in (self._listener, self._woken, self._waker):
            each.close()
        self._launcher.close()

    def wake(self) -> None:
        """Makes a `poll` that waits return; from any thread."""
        with contextlib.suppress(OSError):  # a full buffer wakes it as well, and a closed cluster does not poll
            self._waker.send(b"\0")

    def watch(self, link: Link, read: Callable[[], None]) -> None:
        """Calls `read` during `poll` whenever another connection is readable."""
        self._selector.register(link, selectors.EVENT_READ, read)

    def unwatch(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)

    def _is_there(self, number: int) -> bool:
        return number in self.present and self.present[number].imports_until_s is None

    def _wake_up(self) -> None:
        self._woken.recv(4096)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no pending connection, or it was closed meanwhile
                return
            self._begin_greeting(connection)

    def _begin_greeting(self, connection: socket.socket) -> None:
        if len(self._greeting) >= _MOST_STRANGERS:  # an agent will dial again
            connection.close()
            return
        link = Link(connection, self._token, listening=True)
        self._greeting[link] = time.monotonic() + _GREETING_S
        self._selector.register(link, selectors.EVENT_READ, lambda: self._greet(link))
        with contextlib.suppress(ChannelClosed):
            link.flush()

    def _greet(self, link: Link) -> None:
        try:
            messages = link.read()
        except ChannelClosed:
            self.strangers += not link.ready
            self._drop(link)
            return
        if not messages:
            return
        # An agent may send reports in the same packet as its greeting.
        first, *rest = messages
        hello = first.get("hello") if isinstance(first, dict) else None
        if not isinstance(hello, dict) or not _is_complete(hello):
            self._drop(link)  # has the token, but is not an agent or worker of this version
            self.strangers += 1
            return
        del self._greeting[link]
        self._selector.unregister(link)
        if hello["role"] == "worker":
            self.arrivals.append((hello, link))
        else:
            self._admit(hello, link, rest)

    def _admit(self, hello: Mapping[str, Any], link: Link, rest: list[Message]) -> None:
        number = hello["host"]
        # Hosts that joined on their own get the lowest free number; too many are refused below.
        if number is None:
            number = next((each for each in range(self.count) if each not in self.present), self.count)
        problem = self._misfit(number, hello)
        if problem:
            self._refuse(number, link, problem)
            link.close()
            return
        self._launched.discard(number)
        host = Host(number, link, hello["pid"], hello["name"], hello["at"], hello["workers"], time.monotonic())
        self.present[number] = host
        self._selector.register(link, selectors.EVENT_READ, lambda: self._read(host))
        self.tell(number, numbered=number)
        if missing := [module for module in self._preload if module not in hello["preloaded"]]:
            host.imports_until_s = time.monotonic() + self._config.start_s
            self.tell(number, preload=missing)
        self._told.append({"came": True, "host": number, "workers": hello["workers"]})
        self._told += [{**message, "host": number} for message in rest if isinstance(message, dict)]

    def _refuse(self, number: int, link: Link, problem: str) -> None:
        with contextlib.suppress(ChannelClosed):
            link.send({"refused": problem, "exit": True})
        self.misfits.append(problem)
        self._told.append({"refused": problem, "host": number})

    def _misfit(self, number: int, hello: Mapping[str, Any]) -> str | None:
        name = f"host {number} ({hello['name']})"
        if number in self.present:
            return f"{name} is already connected, by the agent with pid {self.present[number].pid}."
        if number >= self.count:
            return f"{name} connected, but this cluster has {self.count} hosts. Raise cluster.hosts, or start fewer."
        if hello["problem"]:
            return f"{name} cannot run this: {hello['problem']}"
        lines = differing(name, hello, self._facts)
        return "The hosts do not fit together:\n  " + "\n  ".join(lines) if lines else None

    def _read(self, host: Host) -> None:
        try:
            messages = host.link.read()
        except ChannelClosed as error:
            self._lose(host, str(error))
            return
        host.heard_s = time.monotonic()
        for message in messages:
            if not isinstance(message, dict):
                continue
            if "preloaded" in message:
                host.imports_until_s = None
                if message["preloaded"] is not None:
                    problem = f"host {host.number} ({host.name}) cannot run this: {message['preloaded']}"
                    self._refuse(host.number, host.link, problem)
                    self._forget(host)
                    return
            self._told.append({**message, "host": host.number})

    def _lose(self, host: Host, reason: str) -> None:
        # A successor with the same number may have connected already.
        if self.present.get(host.number) is host:
            self._forget(host, keep_pid=True)
            self._told.append({"lost": reason, "host": host.number})

    def _forget(self, host: Host, *, keep_pid: bool = False) -> None:
        if keep_pid:
            self._launcher.end(host.number, host.pid)  # an unreachable agent must not run next to its successor
        self.unwatch(host.link)
        host.link.close()
        self.present.pop(host.number, None)

    def _look_after(self) -> None:
        """Pings agents and drops silent ones; after a stall of this process all get another chance."""
        now_s = time.monotonic()
        if now_s - self._polled_s > _STALL_S:
            for host in self.present.values():
                host.heard_s = now_s
        self._polled_s = now_s
        # A single delayed answer must not count as silence.
        if now_s - self._pinged_s > self._config.silence_s / 4:
            self._pinged_s = now_s
            for number in tuple(self.present):
                self.tell(number, ping=now_s)
        for host in tuple(self.present.values()):
            with contextlib.suppress(ChannelClosed):
                host.link.flush()
            if now_s > max(host.heard_s + self._config.silence_s, host.imports_until_s or 0.0):
                self._lose(host, f"silent for {now_s - host.heard_s:.1f} s")
        for link in [link for link, until_s in self._greeting.items() if now_s > until_s]:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._greeting.pop(link, None)
        self.unwatch(link)
        link.close()


_HELLOS: Mapping[Any, Mapping[str, tuple[type, ...]]] = {
    "worker": {"formation": (int,), "rank": (int,), "devices": (int,)},
    "agent": {
        "host": (int, type(None)),
        "pid": (int,),
        "name": (str,),
        "at": (str,),
        "workers": (list,),
        "versions": (dict,),
        "plugins": (dict,),
        "failed": (dict,),
        "preloaded": (list,),
        "problem": (str, type(None)),
    },
}


def _is_complete(hello: Mapping[str, Any]) -> bool:
    """Returns whether a greeting has the fields of its role."""
    role = hello.get("role")
    wanted = _HELLOS.get(role) if isinstance(role, str) else None
    if wanted is None:
        return False
    fits = all(isinstance(hello.get(name), kinds) for name, kinds in wanted.items())
    return fits and all(isinstance(facts, dict) for facts in hello.get("workers", ()))


def _listening(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"The driver cannot listen at cluster.address {address[0]}:{address[1]}: {error}. Is it this machine's "
            "address, and the port free? Port 0 takes a free one."
        ) from error
    listener.setblocking(False)
    return listener
