"""An engine lays its pages out as the implementations for the chip read them, unless its config names a layout."""

import dataclasses
from typing import Any

import jax
import pytest

from stack_core.abi.caches import Latent
from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.ops.definitions.paged_attention import REFERENCE
from stack_core.ops.references.paged_pools import LAYOUTS
from stack_serve.llm.cache import LayoutPreferences
from stack_serve.llm.config import EngineConfig, PageLayout
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.limits import Limits
from stack_serve.llm.placement import AbstractPlacement
from stack_serve.llm.programs import Programs

from .tiny_checkpoint import EMBED, HEADS, STATES, TinyCheckpoint

CONFIG = EngineConfig(max_sequences=2, step_tokens=8, page_tokens=4)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a kernel of the highest priority that reads one layout, beside what is registered."""

    def reads(layout: str) -> None:
        def supports(call: Any, chip: Any, config: Any) -> bool | str:
            return call.options["layout"] == layout or "another layout"

        kernel = dataclasses.replace(REFERENCE, name="kernel", supports=supports, priority=99)
        entries = {entry.name: entry for entry in registries.ops.entries()}
        entries["paged_attention/kernel"] = Entry("paged_attention/kernel", kernel, "test")
        monkeypatch.setattr(registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)

    return reads


class SeenPlacement(AbstractPlacement):
    """Keeps the shapes of the pools that it places."""

    def pools(self, shapes: Any, layout: PageLayout) -> Any:
        self.seen = super().pools(shapes, layout)
        return self.seen


def layout_of(config: EngineConfig) -> tuple[str, tuple[int, ...]]:
    """The layout of an engine's programs, and the shape of one layer's keys."""
    placement = SeenPlacement(STATES, 1, jax.devices())
    programs = Programs(TinyCheckpoint(), config, max_tokens=16, pages=6, placement=placement)
    return programs.page_layout, placement.seen.key.arrays[0].shape


def shape(layout: str) -> tuple[int, ...]:
    sizes = {"p": 6, "s": CONFIG.page_tokens, "h": HEADS, "2": 2, "d": EMBED // HEADS}
    return tuple(sizes[axis] for axis in layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_the_one_that_the_best_implementation_reads(reads: Any, layout: str) -> None:
    reads(layout)
    assert layout_of(CONFIG) == (layout, shape(layout))


def test_a_layout_that_the_config_names_stays(reads: Any) -> None:
    reads("phsd")
    assert layout_of(dataclasses.replace(CONFIG, page_layout="hpsd")) == ("hpsd", shape("hpsd"))


def test_where_all_are_alike_a_tokens_heads_lie_together() -> None:
    assert layout_of(CONFIG) == ("pshd", shape("pshd"))


def test_most_calls_decide() -> None:
    assert LayoutPreferences().best == "pshd"
    assert LayoutPreferences(["phsd", "hpsd", "hpsd"]).best == "hpsd"
    assert LayoutPreferences(["phsd", "psh2d", "psh2d"]).best == "psh2d"
    assert LayoutPreferences(["phsd", "psh2d", "psh2d"], one_pool=False).best == "phsd"


def test_latents_have_no_pool_of_keys_beside_values() -> None:
    checkpoint: Any = TinyCheckpoint()
    checkpoint = dataclasses.replace(checkpoint, states=Latent(repeats=1, dim=8, value_dim=5, dtype="float32"))
    with pytest.raises(ConfigError, match=r"'psh2d' stores keys and values of equal width in one pool; .* has latents"):
        Limits.of(checkpoint, dataclasses.replace(CONFIG, page_layout="psh2d"))


def found(layout: PageLayout | None) -> list[tuple[list[int], int]]:
    """The tokens of three requests, two of which begin alike, and how many tokens each found in the cache."""
    config = dataclasses.replace(CONFIG, page_layout=layout)
    answers = []
    with LLMEngine(TinyCheckpoint(), config) as engine:
        for number, prompt in enumerate(((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 3), (7, 7))):
            params = SamplingParams(max_tokens=8, temperature=0.0)
            engine.submit(GenerationRequest(request_id=str(number), prompt=prompt, sampling=params))
            updates = list(engine.stream(str(number)))
            answers.append(([token for each in updates for token in each.tokens], updates[-1].cached_tokens))
    return answers


@pytest.mark.slow  # two engines are compiled; integration_tests have one by default whose layout is named
def test_continuations_and_reused_prefixes_are_those_of_any_other_layout(reads: Any) -> None:
    expected = found("pshd")
    assert [cached for _, cached in expected] == [0, 8, 0]
    reads("phsd")
    assert found(None) == expected
    assert found("psh2d") == expected
