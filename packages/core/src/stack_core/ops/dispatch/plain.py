"""Whether a reference is traced to be differentiated by JAX alone: forward mode, and derivatives of derivatives.

A `custom_vjp` has no forward-mode derivative. Whatever has one for its speed asks `is_plain` and leaves it out.
"""

import contextlib
from typing import Any

import jax

__all__ = ["is_plain", "plain"]

# Made here because to enter a new one while tracing would make JAX trace again whatever it traced before.
_plain: Any = jax.make_user_context(None)


def is_plain() -> bool:
    """Whether what is traced must hold no `custom_vjp`."""
    return _plain.value is True


def plain() -> contextlib.AbstractContextManager[None]:
    """Asks for the plain form of what is traced in the block; it is a part of the key of `jax.jit`'s caches."""
    return _plain(True)
