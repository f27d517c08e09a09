"""The program transform: a jaxpr run again, with quantized operands in its products."""
