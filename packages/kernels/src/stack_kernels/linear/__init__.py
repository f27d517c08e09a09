"""Implementations of `linear`, and the product shared with other ops."""
