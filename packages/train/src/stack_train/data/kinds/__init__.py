"""Kinds of data: what `data.kind` selects, one file a kind."""
