"""Optimizers: configs that build Optax transformations, one file each."""

from stack_train.optim.adafactor import AdafactorConfig
from stack_train.optim.adamw import AdamWConfig
from stack_train.optim.groups import GroupConfig
from stack_train.optim.lion import LionConfig
from stack_train.optim.muon import MuonConfig
from stack_train.optim.optimizer import OptimizerConfig
from stack_train.optim.outer import OuterConfig
from stack_train.optim.schedule import ScheduleConfig
from stack_train.optim.schedule_free import ScheduleFreeConfig
from stack_train.optim.sgd import SgdConfig
from stack_train.optim.spikes import SpikeConfig

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "GroupConfig",
    "LionConfig",
    "MuonConfig",
    "OptimizerConfig",
    "OuterConfig",
    "ScheduleConfig",
    "ScheduleFreeConfig",
    "SgdConfig",
    "SpikeConfig",
]
