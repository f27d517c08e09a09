"""Every exception a user can cause.

    StackError
    ├── ConfigError            a config file, an override or a section that does not fit
    ├── PluginError            a plugin that cannot be loaded, or that clashes with another
    ├── UnknownName            a name that no registry entry has
    ├── UnsupportedOp          no implementation of an op accepts a call
    ├── ArgumentError          a value that an op cannot take
    │   └── ShapeError             arrays that do not fit together
    ├── ShardingError          logical axes that collide or do not divide
    ├── HardwareError          a device that is missing or unknown
    ├── BenchmarkError         a measurement that cannot be taken, read or compared
    ├── ClusterError           hosts that cannot be joined, do not fit together, or are gone
    │   ├── FormationLost          an array or a call of processes that have ended
    │   └── RunGivenUp             a run that fails again and again; says where and by what
    ├── DataError              a data source that is empty, unreadable or malformed
    ├── ConversionError        weights that do not match the model they are meant for
    ├── RunDirectoryError      a run directory that is busy, taken or missing
    ├── JournalError           a journal that cannot be opened, read or written
    ├── CheckpointError        a checkpoint that cannot be written or read
    │   ├── CheckpointDamaged      its contents differ from their digests
    │   └── CheckpointIncomplete   a part of the unit is missing
    ├── BundleError            a model that cannot be exported, or a bundle that cannot be opened
    │   └── BundleDamaged          a file of it differs from its digest
    ├── InferenceError         inputs that a model's signature does not take
    ├── GenerationError        a prompt or a sampling setting that the model cannot serve
    │   └── ChatTemplateError      messages that the model's chat template does not take, or no template at all
    ├── DeadlineExceeded       a request whose time is over before it was computed
    ├── EngineBusy             an engine whose queue is full
    ├── EngineStopped          an engine that was closed, or that failed
    ├── TuningError            what cannot be tuned, or a tuned table that cannot be read or merged
    ├── SandboxError           a sandbox that cannot keep a program in, and does not start
    ├── EnvironmentFailed      an environment, or a reward, that raised or gave no finite number
    └── TrainingError          training that cannot go on
        ├── NonFiniteLoss          the loss became NaN or infinite
        └── Interrupted            the user stopped the run; its state is saved

The command line prints the message of a `StackError` without a traceback and exits with status 2.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "BenchmarkError",
    "BundleDamaged",
    "BundleError",
    "ChatTemplateError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIncomplete",
    "ClusterError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "DeadlineExceeded",
    "EngineBusy",
    "EngineStopped",
    "EnvironmentFailed",
    "FormationLost",
    "GenerationError",
    "HardwareError",
    "InferenceError",
    "Interrupted",
    "JournalError",
    "NonFiniteLoss",
    "PluginError",
    "RunDirectoryError",
    "RunGivenUp",
    "SandboxError",
    "ShapeError",
    "ShardingError",
    "StackError",
    "TrainingError",
    "TuningError",
    "UnknownName",
    "UnsupportedOp",
    "nearest",
]


class StackError(Exception):
    """A mistake the user can mend: the message says what was wrong, what was given, what was expected, what to do."""


class ConfigError(StackError): ...


class PluginError(StackError): ...


class UnknownName(StackError): ...


class UnsupportedOp(StackError): ...


class ArgumentError(StackError): ...


class ShapeError(ArgumentError): ...


class ShardingError(StackError):
    """`logical_axes` are those whose sizes the mesh does not divide, if that is the mistake."""

    def __init__(self, message: str, *, logical_axes: Iterable[str | None] = ()) -> None:
        super().__init__(message)
        self.logical_axes = tuple(axis for axis in logical_axes if axis is not None)


class HardwareError(StackError): ...


class BenchmarkError(StackError): ...


class ClusterError(StackError): ...


class FormationLost(ClusterError): ...


class RunGivenUp(ClusterError): ...


class DataError(StackError): ...


class ConversionError(StackError): ...


class RunDirectoryError(StackError): ...


class JournalError(StackError): ...


class CheckpointError(StackError): ...


class CheckpointDamaged(CheckpointError): ...


class CheckpointIncomplete(CheckpointError): ...


class BundleError(StackError): ...


class BundleDamaged(BundleError): ...


class InferenceError(StackError):
    """`parameter` is the tensor or axis that is at fault, if one is."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class GenerationError(StackError):
    """`parameter` is the field of the request that is at fault, if one is."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ChatTemplateError(GenerationError): ...


class DeadlineExceeded(StackError): ...


class EngineBusy(StackError):
    """`retry_after_s` is when there may be room again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(StackError): ...


class TuningError(StackError): ...


class SandboxError(StackError): ...


class EnvironmentFailed(StackError): ...


class TrainingError(StackError): ...


class NonFiniteLoss(TrainingError): ...


class Interrupted(TrainingError): ...


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the known names closest to `name`, or "" when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
