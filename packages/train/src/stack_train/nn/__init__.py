"""Decoder layers as hashable specifications, each with its cached state and the module that it builds."""
