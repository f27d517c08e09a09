"""The data kinds that `data.kind` selects, one file per kind."""
