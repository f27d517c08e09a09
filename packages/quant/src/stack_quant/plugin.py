"""What stack-quant registers: nothing yet."""

STACK_ABI_MINOR = 0
