"""Rotations of parameters that leave a model unchanged."""
