"""Launchers: how agents are started on hosts, one file each."""
