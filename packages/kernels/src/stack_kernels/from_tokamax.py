"""Shared parts of the adapters to Tokamax, an optional package (https://github.com/openxla/tokamax).

Tokamax's public functions choose a kernel by the local devices and a fixed order. The adapters instead run one forward
or backward pass of one kernel, with the config that this package chose for the call.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from stack_core.doctor.packages import unmet_requirements
from stack_kernels.checks import TOKAMAX_VERSION
from stack_kernels.mesh_types import untyped

__all__ = ["GENERATIONS", "is_installed", "missing", "on_arrays", "run"]

GENERATIONS = {"a100": "sm80", "h100": "sm90", "h200": "sm90", "gh200": "sm90", "b200": "sm100", "gb200": "sm100"}
"""Instruction set by the first word of a GPU's kind; Tokamax has separate kernels per generation."""


@functools.cache
def is_installed(module: str = "tokamax") -> bool:
    """Checks whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def missing(*modules: str) -> str | None:
    """Returns why Tokamax or another required module cannot be used; None if all of them can.

    Args:
      modules: further modules that a kernel needs.
    """
    if not is_installed("tokamax"):
        return "Tokamax is not installed: pip install 'stack-kernels[tokamax]', with Python 3.12 or newer"
    version = importlib.metadata.version("tokamax")
    if version != TOKAMAX_VERSION:
        return f"it is written for tokamax {TOKAMAX_VERSION}, and {version} is installed"
    advice = "pip install 'stack-kernels[tokamax-triton]'"
    if absent := [name for name in modules if not is_installed(name)]:
        return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: {advice}"
    problems = [problem for module in modules for problem in unmet_requirements(module)]
    return f"{'; '.join(problems)}: {advice}" if problems else None


def run(op: Any, config: Any, *arguments: Any, **options: Any) -> Any:
    """Runs one pass of a Tokamax op, bypassing its derivative rule and its config search.

    Args:
      op: the op.
      config: object of the op's `config_cls`.

    Returns:
      Result and residuals.
    """
    bound = op.bind(*arguments, **options)
    return op._fwd(*bound.args, config=config, **bound.kwargs)


def on_arrays(function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `function(*arrays)` under Tokamax's assumptions: standard dtype promotion, results without mesh axes.

    The function is jitted, so an enclosing trace sees one call; the operations around its kernels name no mesh axes
    either.
    """
    import jax

    with jax.numpy_dtype_promotion("standard"):
        return untyped(jax.jit(function), *arrays)
