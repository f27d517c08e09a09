"""`rope` in machine code."""
