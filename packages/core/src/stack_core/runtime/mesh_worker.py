"""The worker that executes a single driver's commands: arrays stay in this process, commands arrive in a stream.

Commands are executed in order; only questions and calls of objects are answered. An error of a command is sticky: later
commands are skipped, and the next question is answered with the error. An exception of an object is not: it answers
its call.
"""

import contextlib
import functools
import io
import math
import os
import pickle
import select
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stack_core.runtime.channel import ChannelClosed, Link, dial
from stack_core.runtime.formation import mesh_sizes
from stack_core.runtime.processes import join
from stack_core.runtime.raised import Raised
from stack_core.runtime.transfer import Index, Transfers, owned_parts, plain_index
from stack_core.runtime.worker import current_worker

__all__ = ["serve"]


def serve(axes: Mapping[str, int], environment: Mapping[str, str]) -> str:
    """Joins this formation's processes, makes the mesh, and executes the driver's commands until it disconnects.

    Args:
      axes: sizes of the mesh's axes, see `mesh_sizes`.
      environment: environment variables to set before JAX uses a device.
    """
    os.environ.update(environment)
    worker = current_worker()
    assert worker is not None, "an agent forked this process"
    order = worker.order
    join(order.processes)
    address, token = worker.driver
    link = dial(address, token)
    link.socket.setblocking(True)
    devices = len(jax.local_devices())
    link.send({"hello": {"role": "worker", "formation": order.formation, "rank": order.rank, "devices": devices}})
    sizes = mesh_sizes(axes, jax.device_count(), processes=order.count)
    if sizes is not None:  # otherwise the driver, which has the numbers too, raises
        kinds = (AxisType.Auto,) * len(sizes)
        shape = tuple(sizes.values())
        devices = jax.devices()[: math.prod(shape)]
        mesh = jax.make_mesh(shape, tuple(sizes), axis_types=kinds, devices=devices)
        _Interpreter(mesh, link).run()
    link.close()
    return "done"


class _Interpreter:
    """The state of a command stream: arrays, functions and objects by number, and the first error."""

    def __init__(self, mesh: jax.sharding.Mesh, link: Link) -> None:
        self._mesh = mesh
        self._link = link
        self._arrays: dict[int, jax.Array] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._objects: dict[int, Any] = {}
        self._sending = threading.Lock()  # threads of objects send as well
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
        self._calls: dict[str, Callable[..., Any]] = {"build": self._build, "invoke": self._invoke}

    def run(self) -> None:
        while True:
            # Waits without the lock, which `read` needs because it also flushes.
            select.select((self._link,), (), ())
            try:
                with self._sending:
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
            self._send(number, self._error, answer)
        elif command in self._calls:
            number, *rest = operands
            answer, error = None, self._error
            if error is None:
                try:
                    answer = self._calls[command](*rest)
                except Exception as raised:  # a user's object may raise anything; the exception is sent to the driver
                    error = Raised.of(raised)
            self._send(number, error, answer)
        # Memory is freed also after an error.
        elif self._error is None or command == "forget":
            self._guarded(command, self._commands[command], operands)

    def _guarded(self, command: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
        try:
            return function(*operands)
        except Exception as error:  # a user's function may raise anything; the error is sent to the driver
            self._error = f"{command}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            return None

    def _send(self, number: int, error: Any, value: Any) -> None:
        """Sends a value to the driver; from any thread."""
        message = pickle.dumps((number, error, value), pickle.HIGHEST_PROTOCOL)
        with self._sending, contextlib.suppress(ChannelClosed):  # without its driver, this process is about to end
            self._link.send(message)

    def _build(self, number: int, pickled: bytes, packed: bytes) -> None:
        build, arguments = pickle.loads(pickled), self._unpacked(packed)
        self._objects[number] = build(functools.partial(self._send, number, None), *arguments)

    def _invoke(self, number: int, method: str, packed: bytes) -> Any:
        arguments, keywords = self._unpacked(packed)
        return getattr(self._objects[number], method)(*arguments, **keywords)

    def _unpacked(self, packed: bytes) -> Any:
        """Unpickles a value whose remote arrays are represented by their numbers."""
        return _Unpickler(packed, self._arrays).load()

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
        return [(index, np.asarray(part)) for index, part in owned_parts(array).items()]

    def _owned_parts(self, number: int) -> tuple[str, list[Index]]:
        """Returns this process's transfer address, and the parts of an array for which it holds the first replica."""
        return self._transfers.address, list(owned_parts(self._arrays[number]))

    def _needed(self, shape: tuple[int, ...], spec: Sequence[Any]) -> list[Index]:
        indices = self._sharding(spec).addressable_devices_indices_map(shape).values()
        return sorted({plain_index(index or (), shape) for index in indices})

    def _offer(self, number: int, offers: Sequence[tuple[Index, int]]) -> None:
        parts = owned_parts(self._arrays[number])
        for index, key in offers:
            self._transfers.offer(key, parts[index])

    def _pull(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: str,
        spec: Sequence[Any],
        parts: Sequence[tuple[str, int, Index]],
    ) -> None:
        """Gathers the parts of an array that this process needs from other processes."""
        whole_index, sharding = tuple((0, size) for size in shape), self._sharding(spec)
        if [index for _, _, index in parts] == [whole_index] and sharding.is_fully_addressable:
            array = self._transfers.pull(*parts[0][:2], shape, jax.numpy.dtype(dtype))
            self._arrays[number] = jax.device_put(array, sharding)  # without a copy on the host
            return
        # Parts of other processes stay uninitialized: `_put` reads only what this process needs.
        whole = np.empty(shape, jax.numpy.dtype(dtype))
        for address, key, index in parts:
            part_shape = tuple(stop - start for start, stop in index)
            region = tuple(slice(start, stop) for start, stop in index)
            whole[region] = np.asarray(self._transfers.pull(address, key, part_shape, whole.dtype))
        self._put(number, whole, spec)


class _Unpickler(pickle.Unpickler):
    """Reads what `remote` pickled, with the arrays that this process holds."""

    def __init__(self, packed: bytes, arrays: Mapping[int, jax.Array]) -> None:
        super().__init__(io.BytesIO(packed))
        self._arrays = arrays

    def persistent_load(self, pid: int) -> jax.Array:
        return self._arrays[pid]
