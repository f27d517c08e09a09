"""A single controller: one driver that computes on meshes of processes on other hosts.

    with Cluster.connect(ClusterConfig(hosts=4)) as cluster:
        training, generation = cluster.mesh({"data": 2}, hosts=2), cluster.mesh({"data": 2}, hosts=2)

        @remote(training)
        def step(params, batch): ...

        params = step(training.put(params), training.put(batch, ("data",)))
        weights = params.reshard(generation)

Dispatch is asynchronous; `get` waits. When a process of a mesh ends, every use of the mesh's arrays raises
`FormationLost`. `mesh.form()` then starts fresh processes, and the driver puts its last copies on them.

A mesh can also hold Python objects (`RemoteObject`), such as a generation engine. `mesh.pull` copies the driver's own
arrays to the mesh.
"""

import itertools
import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import ClusterError, ConfigError, FormationLost
from stack_core.abi.launchers import Launcher
from stack_core.abi.plugins import registries
from stack_core.runtime.attribution import attributed
from stack_core.runtime.channel import ChannelClosed, Link
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.formation import Formation, formed, mesh_sizes, updated
from stack_core.runtime.hosts import Hosts
from stack_core.runtime.record import read_token
from stack_core.runtime.remote import RemoteArray, transfer_plan
from stack_core.runtime.transfer import Index, Transfers, owned_parts

__all__ = ["Cluster", "RemoteMesh"]

_TURN_S = 0.1
_GATHER_S = 0.15
_LOOK_S = 0.05  # interval between polls of the agents while commands are dispatched
_MOST_WAITING_BYTES = 64 << 20
_LAST_OUTPUT_CHARACTERS = 2000


class Cluster:
    """Hosts with one agent each, and their meshes. Created by `connect`.

    All methods except `wake` must be called from the same thread.
    """

    def __init__(self, config: ClusterConfig, hosts: Hosts) -> None:
        self.config, self.hosts = config, hosts
        self._numbers = itertools.count(1)
        self._meshes: list[RemoteMesh] = []

    @classmethod
    def connect(cls, config: ClusterConfig, *, preload: Sequence[str] = ()) -> "Cluster":
        """Starts the agents, or waits for agents that join; returns when all are connected.

        Args:
          preload: modules that the driver's functions need, imported once per host.

        Raises:
          ClusterError: some hosts do not connect, or are incompatible.
          ConfigError: the driver cannot listen at the address, or `hosts` is a range.
        """
        launcher: Launcher = registries.launchers[config.launcher](config)
        token = read_token(Path(config.token_file)) if config.token_file else secrets.token_bytes(32)
        modules = ("stack_core.runtime.mesh_worker", *preload)
        if not config.host_range.is_fixed:
            raise ConfigError(
                f"hosts is {config.hosts!r}, but a cluster with meshes has a fixed number of hosts. Give one number; "
                "only `stack train` changes its number of hosts."
            )
        count = config.host_range.maximum
        hosts = Hosts(config, launcher, token, count=count, preload=modules)
        try:
            hosts.start(range(count))
        except BaseException:  # including Ctrl-C: no agent may be left behind
            hosts.close()
            raise
        return cls(config, hosts)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def mesh(
        self, axes: Mapping[str, int], *, hosts: int | None = None, environment: Mapping[str, str] | None = None
    ) -> "RemoteMesh":
        """Forks a worker on each of several free hosts and joins all their devices into a mesh.

        Args:
          axes: sizes by name; their product is the number of devices of these hosts. One size may be -1, which takes
            the remaining devices. On a single host the mesh may have fewer devices, the first of that host.
          hosts: number of hosts; by default all free ones.
          environment: environment variables of the workers, such as CUDA_VISIBLE_DEVICES, set before JAX uses a device.
            Set variables that JAX reads when it is imported for the agents instead.

        Raises:
          ClusterError: there are not enough hosts or devices; the message lists the available ones.
        """
        mesh = RemoteMesh(self, axes, len(self.free()) if hosts is None else hosts, environment or {})
        mesh.form()
        self._meshes.append(mesh)
        return mesh

    def free(self) -> list[int]:
        """Returns the hosts that no mesh uses."""
        used = {host for mesh in self._meshes for host in mesh.used_hosts}
        return [number for number in sorted(self.hosts.present) if number not in used]

    def next_number(self) -> int:
        """Returns a number that is unique in this cluster."""
        return next(self._numbers)

    def close(self) -> None:
        """Ends all workers and agents."""
        for mesh in self._meshes:
            mesh.drop_links()
        self.hosts.close()

    def poll(self, timeout_s: float) -> None:
        """Polls messages from agents and workers."""
        for message in self.hosts.poll(timeout_s):
            for mesh in self._meshes:
                mesh.hear(message)

    def wake(self) -> None:
        """Makes a `poll` that waits return; from any thread."""
        self.hosts.wake()

    def forget(self, mesh: "RemoteMesh") -> None:
        self._meshes.remove(mesh)


class RemoteMesh:
    """Devices of other processes as a mesh with named axes; created by `Cluster.mesh`.

    Attributes:
      axes: sizes by name; an axis given as -1 has its size once the mesh is formed.
      formation_number: number of its current formation; increases with each `form`.
    """

    def __init__(self, cluster: Cluster, axes: Mapping[str, int], hosts: int, environment: Mapping[str, str]) -> None:
        self.cluster, self.axes, self._count = cluster, dict(axes), hosts
        self._environment = dict(environment)
        self.formation_number = 0
        self._formation: Formation | None = None
        self._links: dict[int, Link] = {}
        self._answers: dict[tuple[int, int], tuple[str | None, Any]] = {}
        self._listeners: dict[int, Callable[[Any, Any], None]] = {}
        self._needed_parts: dict[Any, list[list[Index]]] = {}
        self._transfers: Transfers | None = None
        self._last_output = ""
        self._unused: deque[int] = deque()
        self._lost_hosts: dict[int, str] = {}
        self._looked_s = 0.0

    @property
    def used_hosts(self) -> tuple[int, ...]:
        return self._formation.hosts if self._formation is not None else ()

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids on their hosts, by rank."""
        return tuple(member.pid for member in self._formation.members) if self._formation is not None else ()

    @property
    def processes(self) -> int:
        """The number of its processes."""
        return self._count

    @property
    def alive(self) -> bool:
        """Whether it has processes, as far as the driver knows; `form` starts some."""
        return self._formation is not None

    def __repr__(self) -> str:
        return f"RemoteMesh({self.axes}, hosts {self.used_hosts}, formation {self.formation_number})"

    def form(self) -> None:
        """Starts fresh processes for the mesh, initially or after a failure; arrays of the old processes are lost.

        Raises:
          ClusterError: the number of hosts or devices does not match, or a worker cannot start.
        """
        hosts = self.cluster.hosts
        own = list(self.used_hosts)
        self.end()
        gone = [number for number in range(hosts.count) if number not in hosts.present]
        hosts.start(gone)
        self._lost_hosts.clear()
        self._last_output = ""
        free = [number for number in self.cluster.free() if number not in own]
        wanted = own or formed(0, "", free, self._count).hosts
        first = hosts.present[wanted[0]]
        at = self.cluster.config.interface or first.at
        number = self.cluster.next_number()
        formation = formed(number, f"{at}:{hosts.ask(wanted[0], 'port')}", wanted, self._count)
        self._formation, self.formation_number = formation, number
        order = {"formation": number, "count": self._count, "coordinator": formation.coordinator}
        arguments = {"axes": self.axes, "environment": self._environment}
        target = {"target": "stack_core.runtime.mesh_worker:serve", "arguments": arguments}
        for member in formation.members:
            hosts.tell(member.host, fork={**order, **target, "rank": member.rank})
        self._await_links(formation)

    def put(self, tree: Any, spec: Sequence[Any] = ()) -> Any:
        """Copies a pytree of host arrays to the mesh.

        Args:
          spec: partitioning of each array, as in `PartitionSpec`; by default every device holds a full copy.
        """
        import jax

        def put(leaf: Any) -> RemoteArray:
            array = np.asarray(leaf)
            result = RemoteArray(self, self.cluster.next_number(), array.shape, array.dtype)
            self.tell("put", result.number, array, tuple(spec))
            return result

        return jax.tree.map(put, tree)

    def pull(self, tree: Any, specs: Any = None) -> Any:
        """Copies a pytree of the driver's own arrays to the mesh by the transfer, which bypasses the command stream.

        Each process of the mesh pulls the parts that it needs. The arrays must not be donated or deleted before a later
        command that uses the copies was answered.

        Args:
          tree: arrays of which this process holds all parts; host arrays are placed on the default device first.
          specs: a partitioning for each array, in the structure of `tree`; by default every device holds a full copy.
        """
        import jax

        leaves, structure = jax.tree.flatten(tree)
        given = [()] * len(leaves) if specs is None else structure.flatten_up_to(specs)
        return jax.tree.unflatten(structure, map(self._pull, leaves, given))

    def _pull(self, leaf: Any, spec: Sequence[Any]) -> RemoteArray:
        import jax

        array = leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf)
        result = RemoteArray(self, self.cluster.next_number(), array.shape, array.dtype)
        if self._transfers is None:
            link = next(iter(self._links.values()))
            self._transfers = Transfers(link.socket.getsockname()[0])
        key = (array.shape, tuple(spec))
        if key not in self._needed_parts:
            self._needed_parts[key] = self.ask("needed", *key)
        parts = owned_parts(array)
        held = [(self._transfers.address, list(parts))]
        [offers], pulls = transfer_plan(held, self._needed_parts[key], self.cluster.next_number)
        for index, number in offers:
            self._transfers.offer(number, parts[index])
        fixed = (result.number, array.shape, result.dtype.name, tuple(spec))
        self.tell_each("pull", [(*fixed, each) for each in pulls])
        return result

    def next_number(self) -> int:
        """Returns a number that is unique in this cluster."""
        return self.cluster.next_number()

    def listen(self, receive: Callable[[Any, Any], None]) -> int:
        """Returns a number under which processes send messages; `receive` gets the error and the value of each."""
        number = self.cluster.next_number()
        self._listeners[number] = receive
        return number

    def unlisten(self, number: int) -> None:
        self._listeners.pop(number, None)

    def check(self) -> None:
        """Raises `FormationLost` if a process has ended, as far as the driver knows."""
        if self._formation is None:
            raise FormationLost(f"{self!r} has no processes; give it some by `mesh.form()`.")
        self._flush()
        if self._lost_hosts or self._formation.broken:
            self._raise_lost()

    def tell(self, *command: Any) -> None:
        """Sends a command to all processes without waiting."""
        self._send(None, _pickled(command))

    def tell_first(self, *command: Any) -> None:
        """Sends a command to the process of rank 0 without waiting."""
        self._send({0: _pickled(command)}, b"")

    def tell_each(self, name: str, operands: Sequence[Sequence[Any]]) -> None:
        """Sends a command to all processes, with separate operands for each."""
        self._send({rank: _pickled((name, *own)) for rank, own in enumerate(operands)}, b"")

    def ask(self, question: str, *operands: Any) -> list[Any]:
        """Returns the answers of all processes, by rank.

        Raises:
          FormationLost: a process has ended.
          ClusterError: an earlier command in the stream raised.
        """
        number = self.cluster.next_number()
        self.tell(question, number, *operands)
        ranks = range(self._count)
        while not all((number, rank) in self._answers for rank in ranks):
            self.check()
            self.cluster.poll(_TURN_S)
        answers = [self._answers.pop((number, rank)) for rank in ranks]
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                raise ClusterError(f"Rank {rank} of {self!r} failed at {error}")
        return [answer for _, answer in answers]

    def unused(self, formation: int, number: int) -> None:
        """Frees an array with the next command; the garbage collector may call it at any time."""
        if formation == self.formation_number:
            self._unused.append(number)

    def end(self) -> None:
        """Ends the processes; `form` starts new ones on the same hosts."""
        self.drop_links()
        if self._formation is None:
            return
        for host in self._formation.hosts:
            self.cluster.hosts.tell(host, end=self._formation.number)
        # Arrays of the old formation have another number and are refused from now on.
        self._formation, self.formation_number = None, -1
        self._answers.clear()
        self._listeners.clear()
        self._needed_parts.clear()
        self._unused.clear()

    def close(self) -> None:
        """Ends the processes and frees their hosts for other meshes."""
        self.end()
        self.cluster.forget(self)

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handles an agent's message about processes of this mesh."""
        if self._formation is None:
            return
        if "lost" in message and message["host"] in self._formation.hosts:
            self._lost_hosts[message["host"]] = message["lost"]
        elif "log" in message and message["formation"] == self._formation.number:
            self._last_output = (self._last_output + message["log"])[-_LAST_OUTPUT_CHARACTERS:]
        elif "worker" in message:
            updated(self._formation, message["worker"], self.cluster.config.stopped_s)

    def drop_links(self) -> None:
        for link in self._links.values():
            self.cluster.hosts.unwatch(link)
            link.close()
        self._links.clear()

    def _send(self, by_rank: Mapping[int, bytes] | None, common: bytes) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self.cluster.poll(0.0)
        self.check()
        # Sent before the command, whose results may need the memory.
        freed = (
            _pickled(("forget", [self._unused.popleft() for _ in range(len(self._unused))])) if self._unused else b""
        )
        try:
            for rank, link in self._links.items():
                if freed:
                    link.send(freed)
                if by_rank is None:
                    link.send(common)
                elif rank in by_rank:
                    link.send(by_rank[rank])
        except ChannelClosed:
            self._raise_lost()
        # Bounds the driver's memory if it dispatches faster than the workers read.
        while any(link.waiting_bytes > _MOST_WAITING_BYTES for link in self._links.values()):
            self.check()
            self.cluster.poll(0.001)
            self._flush()

    def _flush(self) -> None:
        try:
            for link in self._links.values():
                link.flush()
        except ChannelClosed:
            self._raise_lost()

    def _raise_lost(self) -> None:
        until_s = time.monotonic() + _GATHER_S
        while time.monotonic() < until_s:
            self.cluster.poll(0.02)
        assert self._formation is not None, "it is checked before"
        failure = attributed(self._formation, lost_hosts=self._lost_hosts)
        reasons = "".join(f"\nHost {host}: {reason}" for host, reason in self._lost_hosts.items())
        self.end()
        output = f"\nThe workers printed last:\n{self._last_output.rstrip()}" if self._last_output else ""
        output = reasons + output
        raise FormationLost(
            f"The mesh {self.axes} lost {failure}. Its arrays are gone: `mesh.form()` gives it fresh processes, on "
            f"which you put your last copies.{output}",
            cause=f"{failure.evidence if self._count == 1 else failure}{output}",
        )

    def _await_links(self, formation: Formation) -> None:
        """Waits for the workers to connect, and compares their number of devices with the axes."""
        hosts = self.cluster.hosts
        devices: dict[int, int] = {}
        until_s = time.monotonic() + self.cluster.config.start_s
        while len(self._links) < self._count:
            for message in hosts.poll(_TURN_S):
                self.hear(message)
                for mesh in self.cluster._meshes:
                    if mesh is not self:
                        mesh.hear(message)
            for hello, link in tuple(hosts.arrivals):
                hosts.arrivals.remove((hello, link))
                # A worker of an earlier formation may connect late.
                if hello["formation"] != formation.number:
                    link.close()
                    continue
                self._links[hello["rank"]] = link
                devices[hello["rank"]] = hello["devices"]
                hosts.watch(link, lambda link=link, rank=hello["rank"]: self._read(rank, link))
            if formation.broken or self._lost_hosts or time.monotonic() > until_s:
                self._raise_lost()
        there = sum(devices.values())
        sizes = mesh_sizes(self.axes, there, processes=self._count)
        if sizes is None:
            axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
            each = ", ".join(f"host {member.host}: {devices[member.rank]}" for member in formation.members)
            self.end()
            raise ClusterError(
                f"A mesh of {axes} does not fit the {there} devices of its {self._count} hosts ({each}). The cluster "
                f"has {hosts.count} hosts. Change the axes, or `hosts`."
            )
        self.axes = sizes

    def _read(self, rank: int, link: Link) -> None:
        try:
            messages = link.read()
        except ChannelClosed:
            self.cluster.hosts.unwatch(link)  # its agent reports the cause
            return
        for message in messages:
            if isinstance(message, bytes):
                number, error, answer = pickle.loads(message)  # authenticated: from a worker of this cluster
                if number in self._listeners:
                    self._listeners[number](error, answer)
                else:
                    self._answers[number, rank] = (error, answer)


def _pickled(command: Sequence[Any]) -> bytes:
    return pickle.dumps(tuple(command), pickle.HIGHEST_PROTOCOL)
