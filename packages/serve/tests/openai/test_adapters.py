"""Adapters, whose names clients give as that of the model."""

from collections.abc import Callable

import pytest

from stack_core.abi.errors import ConfigError, ConversionError, GenerationError
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.service import Service

from .conftest import Served
from .fake_engine import FakeEngine, checkpoint


class WithAdapters(FakeEngine):
    """An engine that has adapters by name."""

    adapters = ("mine", "yours")

    def load_adapter(self, name: str, adapters: object) -> None:
        if adapters == "missing":
            raise ConversionError("missing cannot be read. Name another.")
        self.adapters = (*self.adapters, name)

    def unload_adapter(self, name: str) -> None:
        self.adapters = tuple(each for each in self.adapters if each != name)


def test_a_request_names_its_adapter_as_the_model(serve: Callable[..., Served]) -> None:
    engine = WithAdapters()
    server = serve(engine)
    for name, adapter in (("tiny", None), ("mine", "mine"), ("yours", "yours")):
        assert server.complete(model=name)["model"] == name
        assert server.chat(model=name)["model"] == name
        assert [request.adapter for request in engine.submitted[-2:]] == [adapter, adapter]
    engine.load_adapter("third", None)
    engine.unload_adapter("mine")
    assert server.complete(model="third")["model"] == "third"
    message = server.refused("/v1/completions", 404, model="mine", prompt="hello")["message"]
    assert message == "The model 'mine' does not exist. This server has: 'tiny', 'yours', 'third'."


def test_adapters_are_listed_with_their_base(serve: Callable[..., Served]) -> None:
    server = serve(WithAdapters())
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert {name: (card["root"], card["parent"]) for name, card in cards.items()} == {
        "tiny": ("tiny", None),
        "mine": ("mine", "tiny"),
        "yours": ("yours", "tiny"),
    }
    assert server.client.get("/v1/models/mine").json() == cards["mine"]


def test_an_adapter_cannot_have_the_models_name() -> None:
    with pytest.raises(ConfigError, match="both called 'tiny'"):
        Service(checkpoint(), OpenAIConfig(), adapters=("mine", "tiny"))


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_clients_load_and_unload_adapters_if_allowed(serve: Callable[..., Served]) -> None:
    server = serve(WithAdapters(), adapter_loading=True)
    answer = server.post(LOAD, lora_name="third", lora_path="runs/third")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    assert server.complete(model="third")["model"] == "third"
    assert "is loaded already" in server.refused(LOAD, lora_name="third", lora_path="x")["message"]
    assert server.post(LOAD, lora_name="third", lora_path="x", load_inplace=True).status_code == 200
    assert "The model is called 'tiny'" in server.refused(LOAD, lora_name="tiny", lora_path="x")["message"]
    error = server.refused(LOAD, lora_name="new", lora_path="missing")
    assert error["param"] == "lora_path" and error["message"] == "missing cannot be read. Name another."
    assert server.refused(LOAD, lora_name="new")["param"] == "lora_path"
    answer = server.post(UNLOAD, lora_name="third")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert server.refused("/v1/completions", 404, model="third", prompt="hello")["code"] == "model_not_found"
    assert (
        "There is no adapter 'third'. Loaded are: 'mine'" in server.refused(UNLOAD, 404, lora_name="third")["message"]
    )


def test_otherwise_adapters_stay_as_they_are(serve: Callable[..., Served]) -> None:
    server = serve(WithAdapters())
    for path, body in ((LOAD, {"lora_name": "a", "lora_path": "b"}), (UNLOAD, {"lora_name": "mine"})):
        assert "--adapter-loading" in server.refused(path, 403, **body)["message"]
    plain = serve(adapter_loading=True)
    assert "loads no adapters" in plain.refused(LOAD, lora_name="a", lora_path="b")["message"]
    with pytest.raises(GenerationError, match="has no adapters"):
        plain.engine.unload_adapter("a")
