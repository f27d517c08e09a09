"""Dispatch of op calls: choice of implementation, forward and backward passes, batching, sharding, explanation."""
