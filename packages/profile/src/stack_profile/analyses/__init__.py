"""Analyses of a trace, one per file; each returns an `Answer`."""
