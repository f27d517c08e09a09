"""Accelerator kernels that can be interpreted on the CPU."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax

from stack_core.abi.ops import OpImplementation
from stack_core.chips.targets import Target

__all__ = ["INTERPRETABLE", "interpreted", "on_hopper"]

INTERPRETABLE = {
    "attention/splash": "attention.splash:splash",
    "exchange/ragged_all_to_all": "exchange.ragged_all_to_all:ragged_all_to_all",
    "linear/mosaic_tpu": "linear.mosaic_tpu:mosaic_tpu",
    "norm/mosaic_tpu": "norm.mosaic_tpu:mosaic_tpu",
    "paged_attention/mosaic_tpu": "paged_attention.mosaic_tpu:mosaic_tpu",
    "ragged_dot/megablox": "ragged_dot.megablox:megablox",
    "ring_attention/blocks": "ring_attention.blocks:blocks",
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


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """Sets an H100 as the device that Pallas' interpreter of GPU kernels looks up; needs jax's CUDA plugin, no GPU."""
    (device,) = Target("h100:1x1x1").devices
    abstract = jax.sharding.Mesh([device], ("device",)).abstract_mesh.abstract_device
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("device",), axis_types=types, abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
