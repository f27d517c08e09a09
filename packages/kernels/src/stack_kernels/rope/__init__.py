"""Implementations of `rope`."""
