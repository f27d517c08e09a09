"""Analyses of a trace, one a file; each returns an `Answer`."""
