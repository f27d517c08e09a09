"""Compilation of programs that call cuDNN, without cuDNN."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

__all__ = ["pretend_cudnn"]

_VERSION = 91_000


@contextlib.contextmanager
def pretend_cudnn() -> Iterator[None]:
    """Pretends that cuDNN is installed: choosing and compiling a program only needs cuDNN's version.

    cuDNN builds its kernels when a program is loaded, so this compiles the call and not the kernel.
    """
    ours: Any = importlib.import_module("stack_kernels.attention.cudnn")
    jaxs: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    kept = ours.is_installed, jaxs.check_cudnn_version
    ours.is_installed, jaxs.check_cudnn_version = lambda: True, lambda: _VERSION
    try:
        yield
    finally:
        ours.is_installed, jaxs.check_cudnn_version = kept
