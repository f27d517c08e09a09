"""Panels of a run's report, built from the files in the run directory without importing JAX."""
