"""Image models behind OpenAI's `/v1/images/generations`."""
