"""Profiles JAX programs: traces joined with the compiled program and the Python source."""
