"""Load on a server that speaks OpenAI's HTTP interface, and what its users would see of it."""
