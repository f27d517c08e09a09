"""What every run needs, whatever it trains: its directory, stop signals, and the bus of its events."""
