"""Implementations of `ring_attention`."""
