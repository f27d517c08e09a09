"""Adapters of an engine by name."""

import pytest

from stack_core.abi.errors import ConfigError, GenerationError
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.served_adapters import ServedAdapters

from .tiny_checkpoint import TinyCheckpoint


@pytest.mark.parametrize("sizes", [{"max_adapters": 2}, {"adapter_rank": 4}, {"max_adapters": 2, "adapter_rank": 4}])
def test_sizes_of_adapters_without_any_are_refused_by_name(sizes: dict[str, int]) -> None:
    given = " and ".join(f"{name}={value}" for name, value in sizes.items())
    with pytest.raises(ConfigError, match=rf"^{given}: the engine has no adapters, and without one at the start"):
        ServedAdapters(TinyCheckpoint(), EngineConfig(**sizes))


def test_without_adapters_none_is_loaded_later() -> None:
    adapters = ServedAdapters(TinyCheckpoint(), EngineConfig())
    assert adapters.shapes is None and adapters.names == () and adapters.find(None) is None
    with pytest.raises(GenerationError, match="was started without adapters, so its programs cannot apply 'mine'"):
        adapters.load("mine", {})
    with pytest.raises(GenerationError, match="There is no adapter 'mine'"):
        adapters.unload("mine")
