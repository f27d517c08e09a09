"""What stack-profile registers: nothing yet."""

STACK_ABI_MINOR = 0
