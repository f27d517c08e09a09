"""Measures implementations of ops and keeps what was measured in tables that choose among them."""
