"""Implementations of `linear_cross_entropy`."""
