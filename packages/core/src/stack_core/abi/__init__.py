"""What crosses the borders of packages: contracts, the machinery of plugins, and what every package needs."""
