"""Launchers, which start agents on hosts, one file each."""
