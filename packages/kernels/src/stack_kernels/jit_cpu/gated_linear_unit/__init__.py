"""`gated_linear_unit` in machine code."""
