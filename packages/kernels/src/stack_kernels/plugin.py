"""What stack-kernels registers: nothing yet."""

STACK_ABI_MINOR = 0
