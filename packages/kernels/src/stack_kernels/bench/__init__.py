"""Measures ops at standard sizes against core's references, and compares with earlier measurements."""
