"""Quantizes Flax models: a program transform over exact parameter paths, with a coverage report."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_quant.calibrate import calibrate as calibrate
    from stack_quant.conversion import fake_quantize as fake_quantize
    from stack_quant.conversion import quantize as quantize
    from stack_quant.qarray import QArray as QArray
    from stack_quant.qarray import dequantize as dequantize
    from stack_quant.qtypes import QType as QType
    from stack_quant.qtypes import qtype as qtype
    from stack_quant.scales import Range as Range
    from stack_quant.spec import ArraySpec as ArraySpec

__all__ = [
    "ArraySpec",
    "QArray",
    "QType",
    "Range",
    "dequantize",
    "fake_quantize",
    "qtype",
    "quantize",
]

# Imported on first use: importing this package imports no jax.
_MODULES = {
    "ArraySpec": "spec",
    "QArray": "qarray",
    "QType": "qtypes",
    "Range": "scales",
    "dequantize": "qarray",
    "fake_quantize": "conversion",
    "qtype": "qtypes",
    "quantize": "conversion",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
