"""OpenAI's HTTP interface over any `Engine` of core's contract."""
