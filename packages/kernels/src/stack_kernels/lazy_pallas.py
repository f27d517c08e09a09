"""Pallas, imported at its first use: the import takes 0.4 s, and every op's choice reads all of its implementations."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["pl", "pltpu"]

if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
else:

    class _LazyModule:
        """A module that is imported when an attribute is read."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    pl, pltpu = _LazyModule("jax.experimental.pallas"), _LazyModule("jax.experimental.pallas.tpu")
