"""`paged_attention` in machine code."""
