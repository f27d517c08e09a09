"""HTML report of a trace, a single self-contained page."""
