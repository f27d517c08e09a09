"""Handles to arrays, functions and objects of a mesh in other processes, used by a single driver."""

import functools
import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from stack_core.abi.errors import ArgumentError, ClusterError, FormationLost
from stack_core.runtime.raised import Raised
from stack_core.runtime.transfer import Index, overlap

__all__ = ["ArrayMesh", "RemoteArray", "RemoteObject", "get", "remote", "transfer_plan"]

F = TypeVar("F", bound=Callable[..., Any])


@runtime_checkable
class ArrayMesh(Protocol):
    """The interface of a mesh that holds remote arrays, implemented by `RemoteMesh`."""

    formation_number: int

    @property
    def processes(self) -> int: ...

    def next_number(self) -> int: ...

    def tell(self, *command: Any) -> None: ...

    def tell_first(self, *command: Any) -> None: ...

    def tell_each(self, name: str, operands: Sequence[Sequence[Any]]) -> None: ...

    def ask(self, question: str, *operands: Any) -> list[Any]: ...

    def unused(self, formation: int, number: int) -> None: ...

    def listen(self, receive: Callable[[Any, Any], None]) -> int: ...

    def unlisten(self, number: int) -> None: ...


class RemoteArray:
    """A handle to an array that the processes of a mesh hold, or will hold once it is computed.

    It belongs to one formation: after the formation has ended, every use raises `FormationLost`. The array is freed
    when the handle is garbage-collected.

    Attributes:
      shape: global shape, over all devices.
      dtype: dtype.
      formation: number of the formation that holds it.
    """

    def __init__(self, mesh: ArrayMesh, number: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.mesh, self.number = mesh, number
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.formation = mesh.formation_number
        weakref.finalize(self, mesh.unused, self.formation, number)

    def __repr__(self) -> str:
        return f"RemoteArray({self.dtype}{list(self.shape)}, formation {self.formation})"

    def check(self, mesh: ArrayMesh | None = None) -> None:
        """Raises an error if the array is lost or not on `mesh`."""
        if mesh is not None and mesh is not self.mesh:
            raise ArgumentError(f"{self!r} is on another mesh. Move it with `array.reshard(mesh)`.")
        if self.formation != self.mesh.formation_number:
            raise FormationLost(
                f"{self!r} is gone: its mesh has formation {self.mesh.formation_number}. Put the array again, from the "
                "last copy that the driver has."
            )

    def get(self) -> np.ndarray:
        """Waits for the array and returns a full copy.

        Raises:
          FormationLost: its processes have ended, or end meanwhile.
          ClusterError: the computation of the array raised; includes the traceback.
        """
        self.check()
        whole = np.empty(self.shape, self.dtype)
        for parts in self.mesh.ask("get", self.number):
            for index, part in parts:
                whole[tuple(slice(start, stop) for start, stop in index)] = part
        return whole

    def wait(self) -> "RemoteArray":
        """Waits until the array is computed."""
        self.check()
        self.mesh.ask("ready", self.number)
        return self

    def reshard(self, mesh: ArrayMesh, spec: Sequence[Any] = ()) -> "RemoteArray":
        """Copies the array to another mesh, or reshards it on its present mesh; the data bypasses the driver.

        Args:
          spec: mesh axis, tuple of axes or None for each axis of the array, as in `PartitionSpec`.
        """
        self.check()
        held = self.mesh.ask("held", self.number)
        needed = mesh.ask("needed", self.shape, tuple(spec))
        offers, pulls = transfer_plan(held, needed, self.mesh.next_number)
        self.mesh.tell_each("offer", [(self.number, each) for each in offers])
        result = RemoteArray(mesh, mesh.next_number(), self.shape, self.dtype)
        name = self.dtype.name
        mesh.tell_each("pull", [(result.number, self.shape, name, tuple(spec), each) for each in pulls])
        return result


def get(tree: Any) -> Any:
    """Replaces the remote arrays of a pytree by their values."""
    return jax.tree.map(lambda leaf: leaf.get() if isinstance(leaf, RemoteArray) else leaf, tree)


def remote(mesh: ArrayMesh, *, donate_argnums: Sequence[int] = ()) -> Callable[[F], F]:
    """Decorates a function to run jitted in the processes of a mesh; calls return remote arrays immediately.

    The function takes and returns pytrees. Its remote arrays must be on `mesh`; NumPy arrays and numbers are sent
    along. Inside, the mesh is JAX's current mesh. The function is sent once per formation and structure of its
    arguments.

    Args:
      donate_argnums: positions of arguments whose buffers may be reused; their handles are invalid after the call.
    """

    def decorate(function: F) -> F:
        sent: dict[Any, tuple[int, Any, tuple[int, ...]]] = {}

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            leaves, tree = jax.tree.flatten((arguments, keywords))
            for leaf in leaves:
                if isinstance(leaf, RemoteArray):
                    leaf.check(mesh)
            key = (mesh.formation_number, tree, tuple(map(_kind, leaves)))
            if key not in sent:
                donated = _donated(arguments, donate_argnums)
                shapes, named = jax.tree.unflatten(tree, map(_shape, leaves))
                found = jax.eval_shape(function, *shapes, **named)
                sent[key] = (_send(mesh, function, tree, donated), found, donated)
            code, shape_tree, donated = sent[key]
            outputs, out_tree = jax.tree.flatten(shape_tree)
            results = [RemoteArray(mesh, mesh.next_number(), out.shape, out.dtype) for out in outputs]
            operands = [(True, leaf.number) if isinstance(leaf, RemoteArray) else (False, leaf) for leaf in leaves]
            mesh.tell("call", code, operands, [each.number for each in results])
            for position in donated:
                if isinstance(leaves[position], RemoteArray):
                    # The number of no formation, so every use of the donated array raises.
                    leaves[position].formation = -1
            return jax.tree.unflatten(out_tree, results)

        return call  # pyrefly: ignore

    return decorate


def _send(mesh: ArrayMesh, function: Callable[..., Any], tree: Any, donated: tuple[int, ...]) -> int:
    number = mesh.next_number()
    mesh.tell("function", number, _cloudpickle().dumps((function, tree)), donated)
    return number


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise ClusterError(
            "Functions and objects are sent to workers by cloudpickle, which is not installed. Install "
            "stack-core[cluster]."
        ) from error
    return cloudpickle


class RemoteObject:
    """A Python object in the process of a mesh, next to the mesh's arrays.

    Its methods run one at a time, in the order of the mesh's command stream: a call sees the effects of all earlier
    commands. The driver does not wait. An exception of a method is passed to the caller and, unlike the error of a
    function, does not stop the stream.

    On a mesh of several processes, each builds an object, and only the object of rank 0 is called. It is built once all
    are built, or fails with the first of them.

    Args:
      mesh: the mesh.
      build: function `build(emit, *arguments)` that returns the object, sent by cloudpickle. `emit(value)` sends a
        picklable value to `receive`; it may be called from any thread at any time.
      arguments: picklable values, in which remote arrays of this mesh stand for the arrays.
      receive: called with each emitted value during `Cluster.poll`.
      on_result: as for `call`, called when the object is built; its result is None.

    Raises:
      FormationLost: the mesh's process has ended, or a remote array is lost.
      ClusterError: cloudpickle is not installed.
    """

    def __init__(
        self,
        mesh: ArrayMesh,
        build: Callable[..., Any],
        *arguments: Any,
        receive: Callable[[Any], None],
        on_result: Callable[[Any, Exception | None], None],
    ) -> None:
        self._mesh = mesh
        self._number = mesh.listen(lambda error, value: receive(value))
        function = _cloudpickle().dumps(build)
        built = self._expect(on_result, answers=mesh.processes)
        mesh.tell("build", built, self._number, function, _packed(mesh, arguments))

    def call(
        self,
        method: str,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        on_result: Callable[[Any, Exception | None], None],
    ) -> None:
        """Calls a method without waiting.

        Args:
          arguments: as for the constructor.
          on_result: called during `Cluster.poll` with the result and None, or with None and the exception. If the
            process ends first, it is not called, and `check` or the next command of the mesh raises `FormationLost`.
        """
        packed = _packed(self._mesh, (tuple(arguments), dict(keywords or {})))
        self._mesh.tell_first("invoke", self._expect(on_result), self._number, method, packed)

    def _expect(self, on_result: Callable[[Any, Exception | None], None], *, answers: int = 1) -> int:
        missing = answers

        def receive(error: Any, value: Any) -> None:
            nonlocal missing
            missing -= 1
            if missing and error is None:
                return
            self._mesh.unlisten(number)
            if isinstance(error, Raised):
                on_result(None, error.exception())
            else:
                on_result(value, None if error is None else ClusterError(f"{self._mesh!r} failed earlier, at {error}"))

        number = self._mesh.listen(receive)
        return number


def _packed(mesh: ArrayMesh, value: Any) -> bytes:
    """Pickles a value, with the numbers of its remote arrays in place of their contents."""
    buffer = io.BytesIO()
    _Pickler(mesh, buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, mesh: ArrayMesh, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._mesh = mesh

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, RemoteArray):
            return None
        obj.check(self._mesh)
        return obj.number


def transfer_plan(
    sources: Sequence[tuple[str, Sequence[Index]]],
    destinations: Sequence[Sequence[Index]],
    next_number: Callable[[], int],
) -> tuple[list[list[tuple[Index, int]]], list[list[tuple[str, int, Index]]]]:
    """Plans the transfer of an array between processes: each process pulls every part that overlaps its own parts.

    Args:
      sources: address and parts of each source.
      destinations: parts of each destination.

    Returns:
      For each source, the (part, key) pairs to offer; for each destination, the (address, key, part) triples to pull.
    """
    offers: list[list[tuple[Index, int]]] = [[] for _ in sources]
    pulls: list[list[tuple[str, int, Index]]] = [[] for _ in destinations]
    for source, (address, indices) in enumerate(sources):
        for index in indices:
            for destination, regions in enumerate(destinations):
                if any(overlap(index, region) for region in regions):
                    key = next_number()
                    offers[source].append((index, key))
                    pulls[destination].append((address, key, index))
    return offers, pulls


def _donated(arguments: Sequence[Any], donate_argnums: Sequence[int]) -> tuple[int, ...]:
    """Returns the positions of the donated leaves among all leaves; positional arguments come first."""
    ends = np.cumsum([0, *(len(jax.tree.leaves(each)) for each in arguments)])
    return tuple(int(leaf) for each in donate_argnums for leaf in range(ends[each], ends[each + 1]))


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, RemoteArray) else leaf


def _kind(leaf: Any) -> Any:
    """Returns the part of the cache key that a leaf contributes: a change retraces the function."""
    return (leaf.shape, np.dtype(leaf.dtype)) if hasattr(leaf, "shape") else type(leaf)
