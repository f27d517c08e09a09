"""Panels of a run's report, made of the files in the run's directory; they import no jax."""
