"""Quantization of JAX models: a program transform driven by rules on parameter paths, with a coverage report.

Quantize a run by a recipe, or any function of parameters by rules::

    import jax.numpy as jnp

    import stack_quant

    done = stack_quant.quantize("runs/small", "w4a8", out="runs/small-w4a8")  # as `stack quantize`
    print(done.loss_before, done.loss_after)
    params, x = {"w": jnp.ones((64, 32))}, jnp.ones((2, 64))
    rules = [stack_quant.Rule(path="w", weights="int8", activations="int8")]
    quantized = stack_quant.quantize_function(lambda params, x: x @ params["w"], params, rules, (x,))
    print(quantized(x).shape, stack_quant.report(quantized))
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_quant.checkpoint import QuantizedCheckpoint as QuantizedCheckpoint
    from stack_quant.checkpoint import quantize as quantize
    from stack_quant.conversion import fake_quantize as fake_quantize
    from stack_quant.conversion import quantize_array as quantize_array
    from stack_quant.mixed.types import Budget as Budget
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

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_quant.checkpoint": ["QuantizedCheckpoint", "quantize"],
            "stack_quant.conversion": ["fake_quantize", "quantize_array"],
            "stack_quant.mixed.types": ["Budget"],
            "stack_quant.model": ["quantize_function", "quantize_model", "report"],
            "stack_quant.qarray": ["QArray", "dequantize"],
            "stack_quant.qtypes": ["QType", "qtype"],
            "stack_quant.recipes": ["load_recipe"],
            "stack_quant.rules": ["Rule"],
            "stack_quant.scales": ["Range"],
            "stack_quant.spec": ["ArraySpec"],
            "stack_quant.transform.coverage": ["Report"],
        },
    )
