"""The worker that executes a single driver's commands: arrays stay in this process, commands arrive in a stream.

Commands are executed in order; only questions are answered. An error is sticky: later commands are skipped, and the
next question is answered with the error.
"""

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stack_core.runtime.channel import ChannelClosed, Link, dial
from stack_core.runtime.processes import join
from stack_core.runtime.transfer import Transfers
from stack_core.runtime.worker import current_worker

__all__ = ["serve"]

Index = tuple[tuple[int, int], ...]


def serve(axes: Mapping[str, int]) -> str:
    """Joins this formation's processes, makes the mesh, and executes the driver's commands until it disconnects."""
    worker = current_worker()
    assert worker is not None, "an agent forked this process"
    order = worker.order
    join(order.processes)
    address, token = worker.driver
    link = dial(address, token)
    link.socket.setblocking(True)
    devices = len(jax.local_devices())
    link.send({"hello": {"role": "worker", "formation": order.formation, "rank": order.rank, "devices": devices}})
    wanted = int(np.prod(list(axes.values())))
    # Otherwise the driver, which compares the same numbers, raises the error.
    if wanted == jax.device_count():
        kinds = (AxisType.Auto,) * len(axes)
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
        _Interpreter(mesh, link).run()
    link.close()
    return "done"


class _Interpreter:
    """The state of a command stream: arrays by number, functions by number, and the first error."""

    def __init__(self, mesh: jax.sharding.Mesh, link: Link) -> None:
        self._mesh = mesh
        self._link = link
        self._arrays: dict[int, jax.Array] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._error: str | None = None
        self._transfers = Transfers(link.socket.getsockname()[0])
        self._commands: dict[str, Callable[..., None]] = {
            "function": self._function,
            "put": self._put,
            "call": self._call,
            "forget": self._forget,
            "offer": self._offer,
            "pull": self._pull,
        }
        self._questions: dict[str, Callable[..., Any]] = {
            "get": self._get,
            "held": self._owned_parts,
            "needed": self._needed,
            "ready": self._ready,
        }

    def run(self) -> None:
        while True:
            try:
                messages = self._link.read()
            except ChannelClosed:
                return
            for message in messages:
                if isinstance(message, bytes):
                    self._obey(*pickle.loads(message))  # authenticated: the sender has the token

    def _obey(self, command: str, *operands: Any) -> None:
        if command in self._questions:
            number, *rest = operands
            answer = None
            if self._error is None:
                answer = self._guarded(command, self._questions[command], rest)
            self._link.send(pickle.dumps((number, self._error, answer), pickle.HIGHEST_PROTOCOL))
        # Memory is freed also after an error.
        elif self._error is None or command == "forget":
            self._guarded(command, self._commands[command], operands)

    def _guarded(self, command: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        try:
            return function(*operands)
        except Exception as error:  # a user's function may raise anything; the error is sent to the driver
            self._error = f"{command}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            return None

    def _sharding(self, spec: Sequence[Any]) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    def _function(self, number: int, pickled: bytes, donated: tuple[int, ...]) -> None:
        function, tree = pickle.loads(pickled)

        def flat(*leaves: Any) -> list[Any]:
            arguments, keywords = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(function(*arguments, **keywords))

        self._functions[number] = jax.jit(flat, donate_argnums=donated)

    def _put(self, number: int, array: np.ndarray, spec: Sequence[Any]) -> None:
        self._arrays[number] = jax.make_array_from_callback(
            array.shape, self._sharding(spec), lambda index: array[index]
        )

    def _call(self, function: int, operands: Sequence[tuple[bool, Any]], results: Sequence[int]) -> None:
        leaves = [self._arrays[value] if is_array else value for is_array, value in operands]
        with jax.set_mesh(self._mesh):
            found = self._functions[function](*leaves)
        self._arrays.update(zip(results, found, strict=True))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)

    def _ready(self, number: int) -> None:
        jax.block_until_ready(self._arrays[number])

    def _get(self, number: int) -> list[tuple[Index, np.ndarray]]:
        array = self._arrays[number]
        return [
            (_plain(shard.index, array.shape), np.asarray(shard.data))
            for shard in array.addressable_shards
            # Replicas hold equal data.
            if shard.replica_id == 0
        ]

    def _owned_parts(self, number: int) -> tuple[str, list[Index]]:
        """Returns this process's transfer address, and the parts of an array for which it holds the first replica."""
        array = self._arrays[number]
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        return self._transfers.address, [_plain(shard.index, array.shape) for shard in shards]

    def _needed(self, shape: tuple[int, ...], spec: Sequence[Any]) -> list[Index]:
        indices = self._sharding(spec).addressable_devices_indices_map(shape).values()
        return sorted({_plain(index or (), shape) for index in indices})

    def _offer(self, number: int, offers: Sequence[tuple[Index, int]]) -> None:
        array = self._arrays[number]
        shards = {_plain(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        for index, key in offers:
            self._transfers.offer(key, shards[index])

    def _pull(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: str,
        spec: Sequence[Any],
        parts: Sequence[tuple[str, int, Index]],
    ) -> None:
        """Gathers the parts of an array that this process needs from the processes of another mesh."""
        # Parts of other processes stay uninitialized: `_put` reads only what this process needs.
        whole = np.empty(shape, jax.numpy.dtype(dtype))
        for address, key, index in parts:
            part_shape = tuple(stop - start for start, stop in index)
            region = tuple(slice(start, stop) for start, stop in index)
            whole[region] = self._transfers.pull(address, key, part_shape, whole.dtype)
        self._put(number, whole, spec)


def _plain(index: Sequence[slice], shape: tuple[int, ...]) -> Index:
    """Converts an index of slices to numbers: (start, stop) for each axis."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
