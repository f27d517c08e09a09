"""Parsers of the formats in which models write tool calls and reasoning, one file a format."""
