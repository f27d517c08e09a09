"""Accelerator kernels that can be interpreted on the CPU."""

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
"""The function that builds each implementation, `make(interpret=...)`."""


def interpreted(name: str, interpret: Any = True) -> OpImplementation:
    """Returns the implementation "op/name" as interpreted on a CPU.

    Args:
      name: "op/name".
      interpret: True, or `pltpu.InterpretParams` to also emulate a TPU's memory, padding and races.
    """
    module, _, function = INTERPRETABLE[name].partition(":")
    return getattr(importlib.import_module(f"stack_kernels.{module}"), function)(interpret=interpret)
