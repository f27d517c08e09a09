"""Implementations of `gated_linear_unit`."""
