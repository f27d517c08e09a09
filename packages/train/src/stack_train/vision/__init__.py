"""Vision towers, and what language models with images share."""
