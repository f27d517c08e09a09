"""Implementations of `norm`."""
