"""Comparisons of captures, and the regression gate."""
