"""Quantization of JAX models: a program transform driven by rules on parameter paths, with a coverage report."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_quant.conversion import fake_quantize as fake_quantize
    from stack_quant.conversion import quantize as quantize
    from stack_quant.model import quantize_function as quantize_function
    from stack_quant.model import quantize_model as quantize_model
    from stack_quant.model import report as report
    from stack_quant.qarray import QArray as QArray
    from stack_quant.qarray import dequantize as dequantize
    from stack_quant.qtypes import QType as QType
    from stack_quant.qtypes import qtype as qtype
    from stack_quant.recipes import load_recipe as load_recipe
    from stack_quant.rules import Rule as Rule
    from stack_quant.scales import Range as Range
    from stack_quant.spec import ArraySpec as ArraySpec
    from stack_quant.transform.coverage import Report as Report

__all__ = [
    "ArraySpec",
    "QArray",
    "QType",
    "Range",
    "Report",
    "Rule",
    "dequantize",
    "fake_quantize",
    "load_recipe",
    "qtype",
    "quantize",
    "quantize_function",
    "quantize_model",
    "report",
]

# Imported on first use, because importing this package must not import JAX.
_MODULES = {
    "ArraySpec": "spec",
    "QArray": "qarray",
    "QType": "qtypes",
    "Range": "scales",
    "Report": "transform.coverage",
    "Rule": "rules",
    "dequantize": "qarray",
    "fake_quantize": "conversion",
    "load_recipe": "recipes",
    "qtype": "qtypes",
    "quantize": "conversion",
    "quantize_function": "model",
    "quantize_model": "model",
    "report": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
