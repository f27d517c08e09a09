"""`linear` in machine code."""
