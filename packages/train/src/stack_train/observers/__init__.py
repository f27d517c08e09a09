"""Observers that write a run's metrics where people and programs read them."""
