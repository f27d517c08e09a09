"""What any HTTP server of the package needs: sockets, limits, keys, a log of requests, an orderly end."""
