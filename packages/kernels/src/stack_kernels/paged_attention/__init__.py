"""Implementations of `paged_attention`."""
