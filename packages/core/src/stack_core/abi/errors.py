"""The exceptions that a user can cause.

    StackError
    ├── ConfigError            an invalid config file, override or section
    ├── PluginError            a plugin that cannot be loaded, or that clashes with another
    ├── UnknownName            a name that is not registered
    ├── UnsupportedOp          no implementation of an op accepts a call
    ├── ArgumentError          an invalid argument of an op
    │   └── ShapeError             arrays whose shapes do not fit together
    ├── ShardingError          logical axes that collide or do not divide
    ├── HardwareError          a device that is missing or unknown
    ├── BenchmarkError         a measurement that cannot be taken, read or compared
    ├── ClusterError           hosts that cannot be joined, are incompatible, or are lost
    │   ├── FormationLost          an array or a call of processes that have ended
    │   └── RunAbandoned           a run that fails repeatedly; names the step and the cause
    ├── DataError              a data source that is empty, unreadable or malformed
    ├── ConversionError        weights that do not match the target model
    ├── RunDirectoryError      a run directory that is locked, occupied or missing
    ├── JournalError           a journal that cannot be opened, read or written
    ├── CheckpointError        a checkpoint that cannot be written or read
    │   ├── CheckpointDamaged      its contents differ from their digests
    │   └── CheckpointIncomplete   a part of the checkpoint is missing
    ├── BundleError            a model that cannot be exported, or a bundle that cannot be opened
    │   └── BundleDamaged          a file of the bundle differs from its digest
    ├── InferenceError         inputs that do not match a model's signature
    ├── GenerationError        a prompt or a sampling setting that the model cannot serve
    │   └── ChatTemplateError      messages that the model's chat template rejects, or a missing template
    ├── DeadlineExceeded       a request whose deadline passed before it was computed
    ├── EngineBusy             an engine whose queue is full
    ├── EngineStopped          an engine that was closed, or that failed
    ├── TuningError            a call that cannot be tuned, or a tuned table that cannot be read or merged
    ├── SandboxError           a sandbox that cannot isolate programs and does not start
    ├── EnvironmentFailed      an environment or reward that raised or returned a non-finite number
    └── TrainingError          training that cannot continue
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
    "RunAbandoned",
    "RunDirectoryError",
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
    """Base class of errors that the user can fix.

    The message contains the problem, the given value, the expected values and a remedy.
    """


class ConfigError(StackError): ...


class PluginError(StackError): ...


class UnknownName(StackError): ...


class UnsupportedOp(StackError): ...


class ArgumentError(StackError): ...


class ShapeError(ArgumentError): ...


class ShardingError(StackError):
    """A sharding that is impossible on the mesh.

    Attributes:
      logical_axes: logical axes whose sizes the mesh does not divide; empty for any other mistake.
    """

    def __init__(self, message: str, *, logical_axes: Iterable[str | None] = ()) -> None:
        super().__init__(message)
        self.logical_axes = tuple(axis for axis in logical_axes if axis is not None)


class HardwareError(StackError): ...


class BenchmarkError(StackError): ...


class ClusterError(StackError): ...


class FormationLost(ClusterError):
    """Processes of a mesh that have ended, and everything that they held.

    Attributes:
      cause: how they ended, such as "rank 0 on host 0: ended by SIGKILL"; "" for arrays of an earlier formation.
    """

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class RunAbandoned(ClusterError): ...


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
    """Inputs that do not match a model's signature.

    Attributes:
      parameter: the tensor or axis at fault, or None.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class GenerationError(StackError):
    """A request that the model cannot serve.

    Attributes:
      parameter: the field of the request at fault, or None.
      code: error code for clients of OpenAI's API, such as "context_length_exceeded", or None.
    """

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.code = parameter, code


class ChatTemplateError(GenerationError): ...


class DeadlineExceeded(StackError): ...


class EngineBusy(StackError):
    """A request rejected because the engine's queue is full.

    Attributes:
      retry_after_s: seconds until the queue may have room again.
    """

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
    """Returns " Did you mean 'x'?" for the known names closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)  # in YAML a name may be a number
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
