"""Parts shared by the package's HTTP servers: sockets, limits, API keys, access log, graceful shutdown."""
