"""Text around language models: prompts from messages, and text from tokens."""
