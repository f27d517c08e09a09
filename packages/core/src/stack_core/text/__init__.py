"""Text processing for language models: chat templates and detokenization."""
