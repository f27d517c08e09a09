"""`linear_cross_entropy` in machine code."""
