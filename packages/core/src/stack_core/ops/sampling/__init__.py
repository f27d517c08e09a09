"""Sampling of the next token on the device."""
