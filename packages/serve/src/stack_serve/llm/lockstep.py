"""Lockstep execution of an engine's programs by several processes (multi-controller SPMD).

Each program spans the devices of all processes. They must launch the same programs in the same order, with the same
inputs. Only the first process, the leader, plans steps and reads results. Before each launch it sends the key of the
program and its inputs from the host to the followers. State on the devices, such as pages, stays there.
"""

import pickle
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stack_core.abi.errors import ClusterError
from stack_core.runtime.channel import ChannelClosed, Link, dial
from stack_core.runtime.processes import Processes, joined
from stack_core.runtime.worker import current_worker
from stack_serve.llm.compiled_programs import Key

__all__ = ["Follower", "Leader", "ProcessGroup", "connect_group"]

_COMPILE = "compile"

# Programs that return the hidden states of a step: of its tokens, and of each row's last token.
_STEPS = ("prefill", "forward", "decode", "verify")

_CONNECT_S = 60.0
_GREETING_S = 5.0
_END_S = 1.0  # the end of a process closes its connections within moments, in any order


class ProcessGroup:
    """Membership of a process in the group of one engine.

    The methods are collective: all processes call them in the same order.

    Args:
      processes: membership of this process.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    @property
    def count(self) -> int:
        """Number of processes."""
        return self._processes.count

    def minimum(self, label: str, value: int) -> int:
        """Returns the minimum of a value over all processes."""
        return min(self._processes.from_each(label, value))

    def check_alike(self, label: str, value: Mapping[str, Any]) -> None:
        """Raises a ConfigError that lists the differences from the first process's value."""
        self._processes.check_alike(label, value)


class Leader(ProcessGroup):
    """The first process of a group. It sends the launches.

    Args:
      links: connections to the followers, ordered by rank.
    """

    def __init__(self, processes: Processes, links: Sequence[Link]) -> None:
        super().__init__(processes)
        self._links = links
        self._compiled = set[Key]()

    def send(self, key: Key, inputs: Sequence[Any] = ()) -> None:
        """Sends a launch to the followers.

        Raises:
          ChannelClosed: a process has ended.
        """
        message = pickle.dumps((key, tuple(inputs)), pickle.HIGHEST_PROTOCOL)
        for link in self._links:
            link.send(message)

    def compile(self, key: Key, compile_program: Callable[[Key], Any]) -> None:
        """Compiles a program in all processes before its first launch.

        Collectives abort a process that waits in them for long, as it would for another one that still compiles.

        Raises:
          ChannelClosed: a process has ended.
        """
        if key in self._compiled:
            return
        self.send((_COMPILE,), (key,))
        compile_program(key)
        for link in self._links:
            while not link.read():
                pass
        self._compiled.add(key)

    def explain(self, error: BaseException) -> BaseException:
        """Returns the cause of a failed launch: the end of a follower, or the error itself."""
        # Followers send nothing. Only a closed connection is readable.
        ended, _, _ = select.select(self._links, (), (), _END_S)
        ranks = [str(rank) for rank, link in enumerate(self._links, start=1) if link in ended]
        if not ranks:
            return error
        cause = ClusterError(f"Process {', '.join(ranks)} of the {self.count} processes of this engine has ended.")
        cause.__cause__ = error
        return cause


class Follower(ProcessGroup):
    """A later process of a group. It repeats the launches of the leader.

    Args:
      link: connection to the first process.
    """

    def __init__(self, processes: Processes, link: Link) -> None:
        super().__init__(processes)
        self._link = link

    def follow(self, run: Callable[..., Any], compile_program: Callable[[Key], Any]) -> None:
        """Repeats the launches of the leader until the leader ends.

        Args:
          run: function that launches a program, such as `Programs.run`. Programs that continue the last step get its
            hidden states before their inputs.
          compile_program: function that compiles a program, or waits for its compilation.
        """
        hidden = last = None
        for key, inputs in self._read_launches():
            if key[0] == _COMPILE:
                compile_program(*inputs)
                self._link.send({"compiled": True})
                continue
            after = {"sample": (last,), "prompt_logprobs": (hidden,)}.get(key[0], ())
            result = run(key, *after, *inputs)
            if key[0] in _STEPS:
                hidden, last = result

    def _read_launches(self) -> Iterator[tuple[Key, tuple[Any, ...]]]:
        while True:
            try:
                messages = self._link.read()
            except ChannelClosed:
                return
            for message in messages:
                assert isinstance(message, bytes)
                yield pickle.loads(message)  # authenticated: the sender has the token


def connect_group() -> Leader | Follower:
    """Connects the workers of a formation. Each worker calls it once.

    Raises:
      ClusterError: this process is no worker of a formation, or another one does not connect.
    """
    worker, processes = current_worker(), joined()
    if worker is None or processes.count == 1:
        raise ClusterError("This process is not one of several workers of a cluster, which connect here.")
    _, token = worker.driver
    # The address at which the other hosts reach JAX's coordinator, which is in the first process as well.
    host = worker.order.coordinator.rpartition(":")[0].strip("[]")
    if not processes.first:
        port = processes.on_first("lockstep", lambda: 0)
        link = dial((host, port), token, timeout_s=_CONNECT_S)
        link.socket.setblocking(True)
        link.send({"rank": processes.id})
        return Follower(processes, link)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=processes.count) as listener:
        processes.on_first("lockstep", lambda: listener.getsockname()[1])
        links = _accept_links(listener, token, processes.count)
    return Leader(processes, links)


def _accept_links(listener: socket.socket, token: bytes, count: int) -> list[Link]:
    """Accepts the connections of the processes after the first."""
    until_s = time.monotonic() + _CONNECT_S
    links: dict[int, Link] = {}
    while len(links) < count - 1:
        listener.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            missing = ", ".join(str(rank) for rank in range(1, count) if rank not in links)
            raise ClusterError(
                f"Process {missing} of an engine did not connect to {listener.getsockname()[0]} in {_CONNECT_S:g} s. "
                "Do the hosts reach each other at this address?"
            ) from error
        if (rank := _read_greeting(connection, token)) is not None:
            links[rank[0]] = rank[1]
    return [links[rank] for rank in sorted(links)]


def _read_greeting(connection: socket.socket, token: bytes) -> tuple[int, Link] | None:
    """Reads the rank of a connected process and returns it with the link; None for a stranger."""
    link = Link(connection, token, listening=True)
    connection.settimeout(_GREETING_S)
    try:
        link.flush()
        while not (messages := link.read()):
            pass
        rank = messages[0]["rank"] if isinstance(messages[0], dict) else None
    except (ChannelClosed, KeyError):  # it has no token, or is silent
        rank = None
    if not isinstance(rank, int):
        link.close()
        return None
    connection.setblocking(True)
    return rank, link
