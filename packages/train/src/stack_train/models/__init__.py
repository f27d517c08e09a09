"""Model families, one file per architecture."""
