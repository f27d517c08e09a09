"""The HTTP server: OpenAI's API over any `Engine` of core's contract."""
