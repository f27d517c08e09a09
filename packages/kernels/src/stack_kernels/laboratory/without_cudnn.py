"""Programs that call cuDNN, where it is not installed."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

__all__ = ["cudnn_taken_for_granted"]

_VERSION = 91_000


@contextlib.contextmanager
def cudnn_taken_for_granted() -> Iterator[None]:
    """Lets programs be chosen and compiled that call cuDNN: compiling asks for its version alone.

    It builds its kernels when a program is loaded, so that what compiles here is the call, not the kernel.
    """
    ours: Any = importlib.import_module("stack_kernels.attention.cudnn")
    jaxs: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    kept = ours.is_installed, jaxs.check_cudnn_version
    ours.is_installed, jaxs.check_cudnn_version = lambda: True, lambda: _VERSION
    try:
        yield
    finally:
        ours.is_installed, jaxs.check_cudnn_version = kept
