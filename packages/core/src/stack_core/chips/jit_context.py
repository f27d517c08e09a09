"""A context value that is part of the key of JAX's jit caches."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["JitContext"]

T = TypeVar("T")


class JitContext(Generic[T]):
    """A thread-local value, None outside of any `with` block, that is part of the key of `jax.jit`'s caches.

    A function traced under one value is traced again under another. Entering a context for the first time registers it
    with JAX, which invalidates everything traced before. A program that never enters one pays nothing. Code that
    enters a context while tracing should create it earlier, with `jax.make_user_context`.

    Values must be hashable; they are compared by `==`.
    """

    def __init__(self) -> None:
        self._context: Any = None
        self._creating = threading.Lock()

    @property
    def value(self) -> T | None:
        return None if self._context is None else self._context.value

    @contextlib.contextmanager
    def __call__(self, value: T | None) -> Iterator[None]:
        """Sets the value inside the `with` block; blocks nest."""
        with self._creating:
            if self._context is None:
                import jax

                self._context = jax.make_user_context(None)
        with self._context(value):
            yield
