"""Checkpoints: a run's state saved atomically, with a digest per leaf that is verified on load."""

from stack_train.checkpoint.directory import CheckpointDirectory
from stack_train.checkpoint.frozen import FrozenRecord
from stack_train.checkpoint.leaves import named_leaves
from stack_train.checkpoint.store import CheckpointConfig, CheckpointStore, Restored

__all__ = ["CheckpointConfig", "CheckpointDirectory", "CheckpointStore", "FrozenRecord", "Restored", "named_leaves"]
