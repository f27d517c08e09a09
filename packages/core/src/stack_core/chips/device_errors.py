"""Causes of JAX's errors about devices, as one line with a remedy."""

import re

__all__ = ["explain_device_error"]

_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory|failed to allocate")
_OLD_DRIVER = re.compile(
    r"driver version is insufficient|CUDA_ERROR_(?:SYSTEM_DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED\w*|INVALID_IMAGE"
    r"|UNSUPPORTED_PTX_VERSION)|[Dd]river is too old|requires a (?:newer )?driver|older than the (?:required|minimum)"
)
_MOST_CHARACTERS = 300


def explain_device_error(error: str, log: str = "") -> str | None:
    """Returns one line about the cause and the remedy of a known error of a driver or an allocator, else None.

    Args:
      error: text of the exception.
      log: further output of the driver, searched as well.
    """
    details = _line(error)
    if _OLD_DRIVER.search(error) or _OLD_DRIVER.search(log):
        return (
            f"The NVIDIA driver is too old for JAX's CUDA: {details} Update the driver: CUDA 13 needs version 580 or "
            "newer. `nvidia-smi` shows the installed version."
        )
    if _NO_MEMORY.search(error) or _NO_MEMORY.search(log):
        return (
            f"The device has no memory left: {details} End the process that holds it (`nvidia-smi` lists processes), "
            "choose another device with CUDA_VISIBLE_DEVICES, or compute less at a time."
        )
    return None


def _line(text: str) -> str:
    line = " ".join(text.split())[:_MOST_CHARACTERS]
    return line if not line or line[-1] in ".!" else f"{line}."
