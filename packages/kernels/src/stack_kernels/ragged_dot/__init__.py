"""Implementations of `ragged_dot`."""
