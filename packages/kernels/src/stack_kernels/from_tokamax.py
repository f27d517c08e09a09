"""Kernels of Tokamax, an optional package (https://github.com/openxla/tokamax): what their adapters have in common.

Its public functions choose by the devices at hand and by a fixed order. The adapters run one forward or backward pass
of it, with the config that the call got here.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from stack_kernels.mesh_types import untyped

__all__ = ["GENERATIONS", "WRITTEN_FOR", "is_installed", "missing", "on_arrays", "run"]

GENERATIONS = {"a100": "sm80", "h100": "sm90", "h200": "sm90", "gh200": "sm90", "b200": "sm100", "gb200": "sm100"}
"""The instructions of a GPU by the first word of its kind; its kernels are written for each generation apart."""

WRITTEN_FOR = "0.0.17"


@functools.cache
def is_installed(module: str = "tokamax") -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def missing(*others: str) -> str | None:
    """Why Tokamax, or another module that its kernel needs, cannot be used here; None where it can."""
    if not is_installed("tokamax"):
        return "Tokamax is not installed: pip install 'stack-kernels[tokamax]', with Python 3.12 or newer"
    version = importlib.metadata.version("tokamax")
    if version != WRITTEN_FOR:
        return f"it is written for tokamax {WRITTEN_FOR}, and {version} is installed"
    absent = [name for name in others if not is_installed(name)]
    if not absent:
        return None
    return f"{' and '.join(absent)} is not installed: pip install 'stack-kernels[tokamax-triton]'"


def run(op: Any, config: Any, *arguments: Any, **options: Any) -> Any:
    """One pass of one of its ops: result and residuals, without its derivative rule and its search for a config.

    Args:
      config: of the op's `config_cls`.
    """
    bound = op.bind(*arguments, **options)
    return op._fwd(*bound.args, config=config, **bound.kwargs)


def on_arrays(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)` as its kernels are written: dtypes promote as JAX has it, results name no mesh axes.

    It is one call to whoever traces it again: what is around its kernels names no mesh axes either.
    """
    import jax

    with jax.numpy_dtype_promotion("standard"):
        return untyped(jax.jit(function), *arrays)
