"""Serves bundles: batches, versions, a repository that may change while it is served."""
