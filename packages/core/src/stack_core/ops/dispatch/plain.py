"""Context for tracing references without `custom_vjp`, for forward mode and higher derivatives.

A `custom_vjp` has no forward-mode derivative. Functions that use one for speed check `is_plain` and omit it.
"""

import contextlib
from typing import Any

import jax

__all__ = ["is_plain", "plain"]

# Created once: entering a new context while tracing would make JAX trace all earlier functions again.
_plain: Any = jax.make_user_context(None)


def is_plain() -> bool:
    """Returns whether the current trace must not contain a `custom_vjp`."""
    return _plain.value is True


def plain() -> contextlib.AbstractContextManager[None]:
    """Requests plain traces in the block; the context is part of the cache key of `jax.jit`."""
    return _plain(True)
