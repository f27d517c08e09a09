"""Commented config files for a first run of each kind, with example data, which `stack init` copies."""
