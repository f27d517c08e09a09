"""Implementations of `linear`, and the product that others share."""
