"""Weights that clients load from a checkpoint on the server's machine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConversionError, EngineStopped, GenerationError

from .conftest import Served
from .fake_engine import FakeEngine

PATH = "/update_weights_from_disk"


class WithWeights(FakeEngine):
    """An engine that notes what `update_weights` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[tuple[Any, dict[str, Any]]] = []

    def update_weights(self, params: Any, **options: Any) -> None:
        if params.shape == (3,):
            raise ConversionError("The new parameters do not match the model.")
        if params.shape == (4,):
            raise EngineStopped("The engine failed.")
        if params.shape == (6,):
            raise GenerationError("Engine 1 cannot take the new weights.", parameter="params")
        self.updates.append((params, options))


@pytest.fixture(autouse=True)
def _checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checkpoints in directories whose names are the numbers of their parameters."""
    monkeypatch.chdir(tmp_path)
    for name in ("2", "3", "4", "5", "6", "unreadable"):
        (tmp_path / name).mkdir()

    def open_for_generation(address: str, *, encoders: bool) -> SimpleNamespace:
        count = address.removeprefix("hf:")
        if not count.isdigit():
            raise ConversionError(f"{address} cannot be read.")
        return SimpleNamespace(load_params=lambda: jnp.zeros(int(count)))

    monkeypatch.setattr("stack_serve.openai.weights.open_for_generation", open_for_generation)


def test_clients_load_weights_if_allowed(serve: Callable[..., Served]) -> None:
    server = serve(WithWeights(), weight_updates=True)
    answer = server.post(PATH, model_path="2")
    assert answer.json() == {"success": True, "message": "The engine has the weights of 2."}
    server.post(PATH, model_path="hf:5", weight_version=9, kv="recompute")
    assert [(params.size, options) for params, options in server.engine.updates] == [
        (2, {"version": None, "kv": "keep", "donate": True}),
        (5, {"version": 9, "kv": "recompute", "donate": True}),
    ]


def test_weights_that_do_not_fit_are_refused_with_the_reason(serve: Callable[..., Served]) -> None:
    server = serve(WithWeights(), weight_updates=True)
    for path, message in (
        ("unreadable", "unreadable cannot be read."),
        ("3", "The new parameters do not match the model."),
        ("missing", "missing is not a path on the server's machine."),
        ("hf:org/model", "hf:org/model is not a path on the server's machine."),
        ("s3://bucket/run", "'s3://bucket/run' is an address of remote storage"),
    ):
        error = server.refused(PATH, model_path=path)
        assert error["param"] == "model_path" and error["message"].startswith(message)
    assert server.refused(PATH, model_path="2", kv="drop")["param"] == "kv"
    assert server.refused(PATH)["param"] == "model_path"
    assert server.refused(PATH, 503, model_path="4")["code"] == "engine_stopped"
    assert server.refused(PATH, 503, model_path="6")["message"] == "Engine 1 cannot take the new weights."
    assert not server.engine.updates


def test_otherwise_weights_stay_as_they_are(serve: Callable[..., Served]) -> None:
    server = serve(WithWeights())
    assert "--weight-updates" in server.refused(PATH, 403, model_path="2")["message"]
    assert not server.engine.updates


def test_an_accelerator_does_not_hold_all_weights_of_a_checkpoint(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(WithWeights(), weight_updates=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert server.post(PATH, model_path="2").status_code == 200
    [(params, _)] = server.engine.updates
    assert isinstance(params, np.ndarray)  # `jax.device_put` places it as the engine wants
