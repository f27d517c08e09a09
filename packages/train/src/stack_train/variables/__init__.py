"""The variables of models: their structure, their roles, and their storage in runs."""
