"""The contracts between packages, the plugin machinery, and utilities that every package needs."""
