"""Text processing for language models: chat templates, message parsers, detokenization and packing."""
