"""Model families, one file an architecture."""
