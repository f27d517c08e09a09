"""What stack-quant registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_array_types(registry: Registrar) -> None:
    registry.add("qarray", "stack_quant.qarray:QArray")


@hookimpl
def stack_register_quantizers(registry: Registrar) -> None:
    registry.add("quant", "stack_quant.section:QUANTIZER")


@hookimpl
def stack_register_configs(registry: Registrar) -> None:
    registry.add("quant", "stack_quant.section:QuantConfig")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "quantize",
        "stack_quant.commands.quantize:quantize",
        help="Quantize a trained model by a recipe.",
        huge_pages=True,
    )
