"""A single controller: one driver that computes on meshes of processes of other hosts.

    with Cluster.connect(ClusterConfig(hosts=4)) as cluster:
        training, generation = cluster.mesh({"data": 2}, hosts=2), cluster.mesh({"data": 2}, hosts=2)

        @remote(training)
        def step(params, batch): ...

        params = step(training.put(params), training.put(batch, ("data",)))
        weights = params.reshard(generation)

Nothing that is dispatched is waited for; `get` waits. When a process of a mesh ends, every use of its arrays raises
`FormationLost`, and `mesh.form()` gives it fresh processes, on which the driver puts its last copies.
"""

import itertools
import math
import pickle
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import ClusterError, FormationLost
from stack_core.abi.launchers import Launcher
from stack_core.abi.plugins import registries
from stack_core.runtime.attribution import attributed
from stack_core.runtime.channel import ChannelClosed, Link
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.formation import Formation, formed, updated
from stack_core.runtime.hosts import Hosts
from stack_core.runtime.record import read_token
from stack_core.runtime.remote import RemoteArray

__all__ = ["Cluster", "RemoteMesh"]

_TURN_S = 0.1
_GATHER_S = 0.15
_LOOK_S = 0.05  # from one look at the agents to the next, while commands are dispatched
_MOST_WAITING_BYTES = 64 << 20


class Cluster:
    """Hosts with an agent each, and the meshes on them; used from one thread. Made by `connect`."""

    def __init__(self, config: ClusterConfig, hosts: Hosts) -> None:
        self.config, self.hosts = config, hosts
        self._numbers = itertools.count(1)
        self._meshes: list[RemoteMesh] = []

    @classmethod
    def connect(cls, config: ClusterConfig, *, preload: Sequence[str] = ()) -> "Cluster":
        """Starts the agents, or awaits those that join; returns when all are there.

        Args:
          preload: modules that the functions of this driver need, imported once a host.

        Raises:
          ClusterError: some hosts do not come, or do not fit.
          ConfigError: the address cannot be listened at.
        """
        launcher: Launcher = registries.launchers[config.launcher](config)
        token = read_token(Path(config.token_file)) if config.token_file else secrets.token_bytes(32)
        modules = ("stack_core.runtime.mesh_worker", *preload)
        count = config.hosts or 1
        hosts = Hosts(config, launcher, token, count=count, preload=modules)
        try:
            hosts.start(range(count))
        except BaseException:  # Ctrl-C, too: no agent may stay
            hosts.close()
            raise
        return cls(config, hosts)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def mesh(self, axes: Mapping[str, int], *, hosts: int | None = None) -> "RemoteMesh":
        """Forks a worker on each of some free hosts and joins all their devices into a mesh.

        Args:
          axes: sizes by name; their product is the number of devices of these hosts.
          hosts: how many; by default all that are free.

        Raises:
          ClusterError: so many hosts, or devices, are not there; says what is.
        """
        mesh = RemoteMesh(self, axes, len(self.free()) if hosts is None else hosts)
        mesh.form()
        self._meshes.append(mesh)
        return mesh

    def free(self) -> list[int]:
        """The hosts that no mesh uses."""
        used = {host for mesh in self._meshes for host in mesh.used_hosts}
        return [number for number in sorted(self.hosts.present) if number not in used]

    def next_number(self) -> int:
        """One that nothing of this cluster has."""
        return next(self._numbers)

    def close(self) -> None:
        """Ends all workers and agents."""
        for mesh in self._meshes:
            mesh.drop_links()
        self.hosts.close()

    def poll(self, timeout_s: float) -> None:
        """Hears what agents and workers say."""
        for said in self.hosts.poll(timeout_s):
            for mesh in self._meshes:
                mesh.hear(said)

    def forget(self, mesh: "RemoteMesh") -> None:
        self._meshes.remove(mesh)


class RemoteMesh:
    """Devices of other processes as a grid with named axes; made by `Cluster.mesh`.

    Attributes:
      formation_number: of its processes now; rises with each `form`.
    """

    def __init__(self, cluster: Cluster, axes: Mapping[str, int], hosts: int) -> None:
        self.cluster, self.axes, self._count = cluster, dict(axes), hosts
        self.formation_number = 0
        self._formation: Formation | None = None
        self._links: dict[int, Link] = {}
        self._answers: dict[tuple[int, int], tuple[str | None, Any]] = {}
        self._unused: deque[int] = deque()
        self._lost_hosts: set[int] = set()
        self._looked_s = 0.0

    @property
    def used_hosts(self) -> tuple[int, ...]:
        return self._formation.hosts if self._formation is not None else ()

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Of its processes on their hosts, by rank."""
        return tuple(member.pid for member in self._formation.members) if self._formation is not None else ()

    @property
    def alive(self) -> bool:
        """Whether it has processes, as far as is known; `form` gives it some."""
        return self._formation is not None

    def __repr__(self) -> str:
        return f"RemoteMesh({self.axes}, hosts {self.used_hosts}, formation {self.formation_number})"

    def form(self) -> None:
        """Gives the mesh fresh processes, for the first time or after a failure; arrays of the old ones are gone.

        Raises:
          ClusterError: the hosts, or their devices, are too few or too many; or a worker cannot start.
        """
        hosts = self.cluster.hosts
        own = list(self.used_hosts)
        self.end()
        gone = [number for number in range(hosts.count) if number not in hosts.present]
        hosts.start(gone)
        self._lost_hosts.clear()
        free = [number for number in self.cluster.free() if number not in own]
        wanted = own or formed(0, "", free, self._count).hosts
        first = hosts.present[wanted[0]]
        at = self.cluster.config.interface or first.at
        number = self.cluster.next_number()
        formation = formed(number, f"{at}:{hosts.ask(wanted[0], 'port')}", wanted, self._count)
        self._formation, self.formation_number = formation, number
        order = {"formation": number, "count": self._count, "coordinator": formation.coordinator}
        target = {"target": "stack_core.runtime.mesh_worker:serve", "arguments": {"axes": self.axes}}
        for member in formation.members:
            hosts.tell(member.host, fork={**order, **target, "rank": member.rank})
        self._await_links(formation)

    def put(self, tree: Any, spec: Sequence[Any] = ()) -> Any:
        """A pytree of host arrays as remote ones.

        Args:
          spec: how each is split, as `PartitionSpec` takes it; by default every device has a whole copy.
        """
        import jax

        def put(leaf: Any) -> RemoteArray:
            array = np.asarray(leaf)
            result = RemoteArray(self, self.cluster.next_number(), array.shape, array.dtype)
            self.tell("put", result.number, array, tuple(spec))
            return result

        return jax.tree.map(put, tree)

    def next_number(self) -> int:
        """One that nothing of this cluster has."""
        return self.cluster.next_number()

    def tell(self, *command: Any) -> None:
        """Sends a command to all processes, and does not wait."""
        self._send(None, _pickled(command))

    def tell_each(self, name: str, operands: Sequence[Sequence[Any]]) -> None:
        """Sends a command to all processes, each with operands of its own."""
        self._send({rank: _pickled((name, *own)) for rank, own in enumerate(operands)}, b"")

    def ask(self, question: str, *operands: Any) -> list[Any]:
        """The answers of all processes, by rank.

        Raises:
          FormationLost: a process has ended.
          ClusterError: something before it in the stream of commands raised.
        """
        number = self.cluster.next_number()
        self.tell(question, number, *operands)
        ranks = range(self._count)
        while not all((number, rank) in self._answers for rank in ranks):
            self._check()
            self.cluster.poll(_TURN_S)
        answers = [self._answers.pop((number, rank)) for rank in ranks]
        for rank, (error, _) in enumerate(answers):
            if error is not None:
                raise ClusterError(f"Rank {rank} of {self!r} failed at {error}")
        return [answer for _, answer in answers]

    def unused(self, formation: int, number: int) -> None:
        """Frees an array with the next command; may be called by the garbage collector at any moment."""
        if formation == self.formation_number:
            self._unused.append(number)

    def end(self) -> None:
        """Ends the processes; `form` makes new ones on the same hosts."""
        self.drop_links()
        if self._formation is None:
            return
        for host in self._formation.hosts:
            self.cluster.hosts.tell(host, end=self._formation.number)
        self._formation, self.formation_number = None, -1
        self._answers.clear()
        self._unused.clear()

    def close(self) -> None:
        """Ends the processes and frees their hosts for other meshes."""
        self.end()
        self.cluster.forget(self)

    def hear(self, said: Mapping[str, Any]) -> None:
        """Takes what an agent tells of this mesh's processes."""
        if self._formation is None:
            return
        if "lost" in said and said["host"] in self._formation.hosts:
            self._lost_hosts.add(said["host"])
        elif "worker" in said:
            updated(self._formation, said["worker"], self.cluster.config.stopped_s)

    def drop_links(self) -> None:
        for link in self._links.values():
            self.cluster.hosts.unwatch(link)
            link.close()
        self._links.clear()

    def _send(self, own: Mapping[int, bytes] | None, common: bytes) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self.cluster.poll(0.0)
        self._check()
        freed = (
            _pickled(("forget", [self._unused.popleft() for _ in range(len(self._unused))])) if self._unused else b""
        )
        try:
            for rank, link in self._links.items():
                if freed:
                    link.send(freed)
                link.send(common if own is None else own[rank])
        except ChannelClosed:
            self._raise_lost()
        while any(link.waiting_bytes > _MOST_WAITING_BYTES for link in self._links.values()):
            self._check()
            self.cluster.poll(0.001)
            self._flush()

    def _flush(self) -> None:
        try:
            for link in self._links.values():
                link.flush()
        except ChannelClosed:
            self._raise_lost()

    def _check(self) -> None:
        if self._formation is None:
            raise FormationLost(f"{self!r} has no processes; give it some by `mesh.form()`.")
        self._flush()
        if self._lost_hosts or self._formation.broken:
            self._raise_lost()

    def _raise_lost(self) -> None:
        until_s = time.monotonic() + _GATHER_S
        while time.monotonic() < until_s:
            self.cluster.poll(0.02)
        assert self._formation is not None, "it is checked before"
        failure = attributed(self._formation, lost_hosts=self._lost_hosts)
        self.end()
        raise FormationLost(
            f"The mesh {self.axes} lost {failure}. Its arrays are gone: `mesh.form()` gives it fresh processes, on "
            "which you put your last copies."
        )

    def _await_links(self, formation: Formation) -> None:
        """Waits for the workers to dial in, and compares their devices with the axes."""
        hosts = self.cluster.hosts
        devices: dict[int, int] = {}
        until_s = time.monotonic() + self.cluster.config.start_s
        while len(self._links) < self._count:
            for said in hosts.poll(_TURN_S):
                self.hear(said)
                for mesh in self.cluster._meshes:
                    if mesh is not self:
                        mesh.hear(said)
            for hello, link in tuple(hosts.arrivals):
                hosts.arrivals.remove((hello, link))
                if hello["formation"] != formation.number:
                    link.close()
                    continue
                self._links[hello["rank"]] = link
                devices[hello["rank"]] = hello["devices"]
                hosts.watch(link, lambda link=link, rank=hello["rank"]: self._read(rank, link))
            if formation.broken or self._lost_hosts or time.monotonic() > until_s:
                self._raise_lost()
        there, wanted = sum(devices.values()), math.prod(self.axes.values())
        if there != wanted:
            axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
            each = ", ".join(f"host {member.host}: {devices[member.rank]}" for member in formation.members)
            self.end()
            raise ClusterError(
                f"A mesh of {axes} takes {wanted} devices, and its {self._count} hosts have {there} ({each}). The "
                f"cluster has {hosts.count} hosts. Change the axes, or `hosts`."
            )

    def _read(self, rank: int, link: Link) -> None:
        try:
            messages = link.read()
        except ChannelClosed:
            self.cluster.hosts.unwatch(link)  # its agent tells why
            return
        for message in messages:
            if isinstance(message, bytes):
                number, error, answer = pickle.loads(message)  # authenticated: from a worker of this cluster
                self._answers[number, rank] = (error, answer)


def _pickled(command: Sequence[Any]) -> bytes:
    return pickle.dumps(tuple(command), pickle.HIGHEST_PROTOCOL)
