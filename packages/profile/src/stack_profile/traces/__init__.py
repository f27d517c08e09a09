"""Readers of traces, and the join of operations with their programs."""
