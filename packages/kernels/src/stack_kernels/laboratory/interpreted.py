"""Kernels for accelerators that the CPU can interpret, operation by operation."""

import importlib
from typing import Any

from stack_core.abi.ops import OpImplementation

__all__ = ["INTERPRETABLE", "interpreted"]

INTERPRETABLE = {
    "attention/splash": "attention.splash:splash",
    "exchange/ragged_all_to_all": "exchange.ragged_all_to_all:ragged_all_to_all",
    "linear/mosaic_tpu": "linear.mosaic_tpu:mosaic_tpu",
    "norm/mosaic_tpu": "norm.mosaic_tpu:mosaic_tpu",
    "paged_attention/mosaic_tpu": "paged_attention.mosaic_tpu:mosaic_tpu",
    "ragged_dot/megablox": "ragged_dot.megablox:megablox",
}
"""The function that makes each implementation, `make(interpret=...)`."""


def interpreted(name: str, interpret: Any = True) -> OpImplementation:
    """The implementation "op/name" as it runs on a CPU.

    Args:
      interpret: True, or `pltpu.InterpretParams` for what a TPU does besides: its memory, its padding, its races.
    """
    module, _, function = INTERPRETABLE[name].partition(":")
    return getattr(importlib.import_module(f"stack_kernels.{module}"), function)(interpret=interpret)
