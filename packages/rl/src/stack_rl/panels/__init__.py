"""Panels that stack-rl adds to a run's report."""
