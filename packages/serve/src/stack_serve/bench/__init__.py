"""Load tests of servers with OpenAI's HTTP API, measured from the client."""
