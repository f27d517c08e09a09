"""Implementations of `attention`."""
