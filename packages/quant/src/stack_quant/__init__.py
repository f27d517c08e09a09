"""Quantizes Flax models: a program transform over exact parameter paths, with a coverage report."""
