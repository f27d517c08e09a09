"""A client of OpenAI's HTTP interface that costs little of the machine that it shares with the server."""
