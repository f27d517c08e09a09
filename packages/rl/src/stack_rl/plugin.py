"""What stack-rl registers: nothing yet."""

STACK_ABI_MINOR = 0
