"""The data kinds that `data.name` selects, one file per kind."""
