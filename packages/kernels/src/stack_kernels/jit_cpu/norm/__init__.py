"""`norm` in machine code."""
