"""Implementations of `exchange`."""
