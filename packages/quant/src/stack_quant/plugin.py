"""The plugin of stack-quant: its transforms, methods, config sections and commands."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_transforms(registry: Registrar) -> None:
    registry.add("quant", "stack_quant.section:Quantization")
    registry.add("lora", "stack_quant.lora.section:LowRankAdaptation")


@hookimpl
def stack_register_methods(registry: Registrar) -> None:
    registry.add("ptq", "stack_quant.methods.ptq:PTQ")
    registry.add("qat", "stack_quant.methods.qat:QAT")
    registry.add("qt", "stack_quant.methods.qt:QT")


@hookimpl
def stack_register_algorithms(registry: Registrar) -> None:
    registry.add("nearest", "stack_quant.algorithms.nearest:NEAREST")
    registry.add("gptq", "stack_quant.algorithms.gptq:GPTQ")
    registry.add("autoround", "stack_quant.algorithms.autoround:AUTOROUND")
    registry.add("hqq", "stack_quant.algorithms.hqq:HQQ")
    registry.add("qep", "stack_quant.algorithms.qep:QEP")
    registry.add("awq", "stack_quant.algorithms.awq:AWQ")
    registry.add("smoothquant", "stack_quant.algorithms.smoothquant:SMOOTHQUANT")
    registry.add("hadamard", "stack_quant.algorithms.hadamard:HADAMARD")
    registry.add("quarot", "stack_quant.algorithms.quarot:QUAROT")


@hookimpl
def stack_register_sections(registry: Registrar) -> None:
    registry.add("quant", "stack_quant.section:QuantConfig")
    registry.add("lora", "stack_quant.lora.section:LoRAConfig")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "quantize",
        "stack_quant.commands.quantize:quantize",
        help="Quantize a trained model by a recipe.",
        huge_pages=True,
    )
