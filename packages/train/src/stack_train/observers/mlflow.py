"""MLflow as tracker of a run: the section `mlflow:` of a config."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from stack_core.abi.config import config, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.abi.event_bus import ObserverContext
from stack_train.observers.tracker import Tracker, require

__all__ = ["MlflowConfig", "MlflowTracker", "mlflow_tracker"]

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_BATCH = 100  # MLflow's limit of parameters in one request


@config
class MlflowConfig:
    """The `mlflow:` section of a run. Needs the extra `mlflow`.

    Attributes:
      tracking_uri: server, such as "http://host:5000", for which `mlflow-skinny` suffices, or database, such as
        "sqlite:///mlflow.db"; None is the environment variable MLFLOW_TRACKING_URI.
      experiment: experiment of the run, which is created if it does not exist.
      name: name of the run; None is the name of its directory.
      tags: tags of the run.
    """

    tracking_uri: str | None = None
    experiment: str = "stack"
    name: str | None = None
    tags: Mapping[str, str] = Field(default_factory=dict)


def mlflow_tracker(context: ObserverContext) -> "MlflowTracker | None":
    """Builds the tracker of a run; returns None without an `mlflow:` section.

    Raises:
      ConfigError: the package `mlflow` is not installed, or no tracking server is named.
    """
    section = getattr(context.config, "sections", {}).get("mlflow")
    if section is None:
        return None
    require(context, "mlflow", "mlflow")
    uri = section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError("mlflow.tracking_uri is not set, and neither is MLFLOW_TRACKING_URI: set one of them.")
    return MlflowTracker(context, section, uri)


class MlflowTracker(Tracker):
    """Observer that logs to MLflow; each value of the config is a parameter of the run, such as `model.layers`."""

    def __init__(self, context: ObserverContext, section: MlflowConfig, uri: str) -> None:
        super().__init__(context.directory)
        self._parameters = dict(_flat(to_mapping(context.config)))
        self._section, self._uri = section, uri
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None) -> str:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        if run_id is None:
            self._run_id = self._create()
        else:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
        return self._run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[status])

    def _create(self) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self._section.experiment)
        experiment = self._client.create_experiment(self._section.experiment) if found is None else found.experiment_id
        name = self._section.name or self.directory.resolve().name
        run_id = self._client.create_run(experiment, run_name=name, tags=dict(self._section.tags)).info.run_id
        parameters = [Param(key, value) for key, value in self._parameters.items()]
        for first in range(0, len(parameters), _BATCH):
            self._client.log_batch(run_id, params=parameters[first : first + _BATCH])
        return run_id


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of nested mappings with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
