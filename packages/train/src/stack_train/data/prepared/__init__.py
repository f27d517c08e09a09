"""Prepared sets: documents tokenized once, in shards that every process of a run maps into memory."""
