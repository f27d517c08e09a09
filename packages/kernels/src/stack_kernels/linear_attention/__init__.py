"""Implementations of `linear_attention`."""
