"""Measures op implementations and stores the results in tables that choose implementations."""
