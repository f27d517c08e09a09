"""Panels of a run's report."""
