"""Adapters, whose names clients give as that of the model."""

from collections.abc import Callable

import pytest

from stack_core.abi.errors import ConfigError
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.service import Service

from .conftest import Served
from .fake_engine import FakeEngine, checkpoint


class WithAdapters(FakeEngine):
    """An engine that has adapters by name."""

    adapters = ("mine", "yours")

    def load_adapter(self, name: str, adapters: object) -> None:
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
