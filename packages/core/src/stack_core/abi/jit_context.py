"""A value for what is traced in a `with` block that JAX's caches know of."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["JitContext"]

T = TypeVar("T")


class JitContext(Generic[T]):
    """A value of the thread, None outside of any `with` block, and a part of the key of `jax.jit`'s caches.

    A function that was traced under one value is traced again under another. JAX learns of the context when it is first
    entered, and from then on holds nothing that it traced before for current: a program that never enters one pays
    nothing, and whoever enters one while tracing should create it earlier, with `jax.make_user_context`.

    The values are compared by `==` and hashed.
    """

    def __init__(self) -> None:
        self._context: Any = None
        self._creating = threading.Lock()

    @property
    def value(self) -> T | None:
        return None if self._context is None else self._context.value

    @contextlib.contextmanager
    def __call__(self, value: T | None) -> Iterator[None]:
        """Sets the value for the block; it nests."""
        with self._creating:
            if self._context is None:
                import jax

                self._context = jax.make_user_context(None)
        with self._context(value):
            yield
