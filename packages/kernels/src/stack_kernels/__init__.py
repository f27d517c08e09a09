"""Fast implementations of stack's ops for TPU, GPU and CPU, and tuned tables that choose an implementation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_kernels.expectations import expected as expected
    from stack_kernels.mesh_types import untyped as untyped
    from stack_kernels.tuning.search import tune as tune
    from stack_kernels.tuning.sources import tuned as tuned
    from stack_kernels.user_kernels import implementation as implementation

__all__ = ["expected", "implementation", "tune", "tuned", "untyped"]

# Imported on first use: importing this package imports no jax.
_MODULES = {
    "expected": "expectations",
    "implementation": "user_kernels",
    "tune": "tuning.search",
    "tuned": "tuning.sources",
    "untyped": "mesh_types",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
