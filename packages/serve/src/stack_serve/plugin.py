"""What stack-serve registers: nothing yet."""

STACK_ABI_MINOR = 0
