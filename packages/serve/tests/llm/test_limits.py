import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.caches import Recurrent
from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.generation import GenerationRequest, PromptImage, SamplingParams
from stack_core.text.images import ImageSize, ReadImage
from stack_serve.llm.cache import empty_layers
from stack_serve.llm.config import ANY_LAYOUT, EngineConfig, SpeculationConfig
from stack_serve.llm.draft_model import check_vocabulary
from stack_serve.llm.limits import Limits, _size_bytes

from ..openai.fake_engine import VOCAB_SIZE, ByteTokenizer
from .constrained import byte_checkpoint
from .tiny_checkpoint import POSITIONS, VOCAB, TinyCheckpoint

LIMITS = Limits.of(TinyCheckpoint(), EngineConfig())


def request_of(prompt: tuple[int, ...] = (1, 2), timeout_s: float | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(request_id="a", prompt=prompt, sampling=SamplingParams(**sampling), timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("request_", "parameter", "says"),
    [
        (request_of(()), "prompt", "no tokens"),
        (request_of((1, VOCAB)), "prompt", f"token {VOCAB}; the model has tokens 0 to {VOCAB - 1}"),
        (request_of((1,) * POSITIONS), "prompt", f"Shorten the prompt to at most {POSITIONS - 1} tokens"),
        (request_of(max_tokens=POSITIONS - 1), "max_tokens", f"Request at most {POSITIONS - 2}"),
        (request_of(n=129), "n", "129 continuations were requested; the maximum is 128"),
        (request_of(logprobs=21), "logprobs", "the maximum is 20"),
        (request_of(prompt_logprobs=21), "prompt_logprobs", "the maximum is 20"),
        (request_of(logit_bias={VOCAB: 1.0}), "logit_bias", f"token {VOCAB}"),
        (request_of(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias", "the maximum is 300"),
        (request_of(stop_tokens=(VOCAB,)), "stop_tokens", f"token {VOCAB}"),
        (request_of(stop_tokens=tuple(range(33))), "stop_tokens", "the maximum is 32"),
        (request_of(max_tokens=3, min_tokens=4), "min_tokens", "min_tokens=4 is more than max_tokens=3"),
        (request_of(stop=("x",)), "stop", "need a tokenizer"),
        (request_of(experts=True), "experts", "the engine 'static' of stack-train"),
        (request_of(timeout_s=0.0), "timeout_s", "positive"),
        (request_of(timeout_s=math.nan), "timeout_s", "positive"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(request_: GenerationRequest, parameter: str, says: str) -> None:
    with pytest.raises(GenerationError, match=says) as caught:
        LIMITS.check(request_)
    assert caught.value.parameter == parameter


@dataclasses.dataclass(frozen=True)
class Reader:
    """Shapes of images of up to 6 tokens."""

    has_grids: bool
    placeholder = "<image>"
    token = 1
    sizes = (2, 6)

    @property
    def layout(self) -> Any:
        return "axes" if self.has_grids else "whole"

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens, 3)

    def expansion(self, size: ImageSize) -> str:
        raise NotImplementedError

    def measure(self, data: bytes) -> ImageSize:
        raise NotImplementedError

    def count_tokens(self, data: bytes) -> int:
        raise NotImplementedError

    def read(self, data: bytes) -> ReadImage:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("has_grids", "changes", "says"),
    [
        (True, {"grid": None}, r"has no grid\. Give the rows and columns"),
        (False, {}, r"has grid=\(2, 3\); images of this model have one size\. Leave the grid out"),
        (True, {"grid": (2, 4), "tokens": 8}, r"grid=\(2, 4\); expected 1 to 6 tokens\. Read it with"),
        (True, {"grid": (-2, -3)}, "expected 1 to 6 tokens"),
        (True, {"grid": (1, 3)}, "has tokens 3 to 9; expected 3 tokens in 2 to 9"),
        (False, {"grid": None, "tokens": 2}, "has tokens 3 to 5; expected 6 tokens in 0 to 9"),
        (True, {"start": 1}, "has tokens 1 to 7; expected 6 tokens in 2 to 9, after the previous image"),
        (True, {"start": 4}, "before the last token"),
        (True, {"pixels": np.zeros((5, 3), np.uint8)}, r"shape \(5, 3\); expected uint8 and \(6, 3\)"),
        (True, {"pixels": np.zeros((6, 3), np.float32)}, "dtype float32 and shape"),
        (True, {"pixels": None}, "dtype None and shape None"),
        (True, {"layout": "rows"}, r"has layout='rows'; expected 'axes'\. Place it with place_images"),
    ],
)
def test_images_that_would_fail_in_the_engine_are_refused(has_grids: bool, changes: dict[str, Any], says: str) -> None:
    grid = (1, 2) if has_grids else None
    limits = dataclasses.replace(LIMITS, image_reader=Reader(has_grids))
    first = PromptImage(0, 2, np.zeros((2, 3), np.uint8), b"a", "axes", grid)
    image = PromptImage(3, 6, np.zeros((6, 3), np.uint8), b"b", "axes" if has_grids else "whole", (2, 3))
    request = request_of((1,) * 10)
    limits.check(dataclasses.replace(request, images=(first, image) if has_grids else ()))
    before = (first,) if has_grids else ()
    with pytest.raises(GenerationError, match=says) as caught:
        limits.check(dataclasses.replace(request, images=(*before, dataclasses.replace(image, **changes))))
    assert caught.value.parameter == "images"
    with pytest.raises(GenerationError, match="reads text only"):
        LIMITS.check(dataclasses.replace(request, images=(image,)))


def test_the_largest_request_is_served() -> None:
    LIMITS.check(request_of(max_tokens=POSITIONS - 2, n=128, logprobs=20, logit_bias={VOCAB - 1: -100.0}))
    LIMITS.check(request_of((1,) * (POSITIONS - 1)))
    assert LIMITS.total_tokens(request_of()) == POSITIONS


def test_requests_have_priorities_where_the_engine_was_made_with_them() -> None:
    request = dataclasses.replace(request_of(), priority=-1)
    Limits.of(TinyCheckpoint(), EngineConfig(priorities=1)).check(request)
    with pytest.raises(GenerationError, match=r"priority=-1: .* --priorities 10") as caught:
        LIMITS.check(request)
    assert caught.value.parameter == "priority"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_tokens_are_reported_than_there_are(name: str) -> None:
    limits = Limits.of(dataclasses.replace(TinyCheckpoint(), vocab_size=7), EngineConfig())
    limits.check(request_of(**{name: 7}))
    with pytest.raises(GenerationError, match=f"{name}: 8 most likely tokens were requested; the maximum is 7"):
        limits.check(request_of(**{name: 8}))


def test_pages_hold_all_sequences_where_memory_allows() -> None:
    assert LIMITS.pages == 32 * POSITIONS // 16
    assert Limits.of(TinyCheckpoint(), EngineConfig(max_tokens=20, page_tokens=8)).pages == 32 * 3


@pytest.mark.parametrize(
    ("free_mb", "fraction", "most_mb"),
    [(100_000, None, 2048), (8000, None, 1024), (5000, None, 1024), (4000, None, 512), (5000, 0.9, 4500)],
)
def test_the_cache_takes_a_small_stated_part_of_a_cpus_memory(
    monkeypatch: pytest.MonkeyPatch, free_mb: int, fraction: float | None, most_mb: int
) -> None:
    monkeypatch.setattr("stack_serve.llm.limits.free_bytes", lambda devices: free_mb << 20)
    checkpoint = dataclasses.replace(TinyCheckpoint(), max_positions=2**23)
    limits = Limits.of(checkpoint, EngineConfig(memory_fraction=fraction, max_tokens=16))
    assert limits.pages == 32  # all sequences fit
    limits = Limits.of(checkpoint, EngineConfig(memory_fraction=fraction, max_tokens=2**20))
    page_bytes = _size_bytes(
        jax.eval_shape(lambda: empty_layers(checkpoint.states, pages=1, page_tokens=16, slots=0, layout=ANY_LAYOUT))
    )
    assert 0.98 * (most_mb << 20) < limits.pages * page_bytes <= most_mb << 20


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EngineConfig(max_tokens=POSITIONS + 1), f"more than the {POSITIONS} positions"),
        (EngineConfig(pages=2), "Give at least 3 pages"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: EngineConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limits.of(TinyCheckpoint(), config)


def test_a_step_has_a_token_for_every_sequence() -> None:
    with pytest.raises(ConfigError, match="step_tokens=16 is less than max_sequences=32"):
        EngineConfig(step_tokens=16)


def test_end_tokens_and_stop_tokens_share_the_places() -> None:
    checkpoint = dataclasses.replace(TinyCheckpoint(), end_tokens=frozenset(range(5)))
    limits = Limits.of(checkpoint, EngineConfig())
    limits.check(request_of(stop_tokens=tuple(range(5, 31))))
    with pytest.raises(GenerationError, match="stop_tokens"):
        limits.check(request_of(stop_tokens=tuple(range(2, 30))))


def test_recurrent_models_are_not_speculated() -> None:
    states = Recurrent(repeats=2, shapes=((4,),), dtypes=("float32",))
    checkpoint: Any = dataclasses.replace(TinyCheckpoint(), states=states)
    with pytest.raises(ConfigError, match="speculation: model 'tiny' has recurrent states"):
        Limits.of(checkpoint, EngineConfig(speculation=SpeculationConfig()))
    assert Limits.of(checkpoint, EngineConfig()).max_tokens == 48
    drafting = EngineConfig(speculation=SpeculationConfig(method="draft"), draft_model="x")
    with pytest.raises(ConfigError, match="speculation: model 'tiny' has recurrent states"):
        Limits.of(TinyCheckpoint(name="served"), drafting, checkpoint)


def test_states_that_exceed_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack_serve.llm.limits.free_bytes", lambda devices: 2**30)
    states = Recurrent(repeats=2, shapes=((2**22, 4),), dtypes=("float32",))
    checkpoint: Any = dataclasses.replace(TinyCheckpoint(), states=states)
    with pytest.raises(ConfigError, match=r"max_sequences=9: .* take 1\.2 GiB, and 1\.0 GiB are free\. Lower max_seq"):
        Limits.of(checkpoint, EngineConfig(max_sequences=9))
    assert Limits.of(checkpoint, EngineConfig(max_sequences=6)).max_tokens == 48


def test_a_draft_model_has_the_vocabulary_of_the_served_one() -> None:
    served, words = byte_checkpoint(name="served"), byte_checkpoint(name="words", tokenizer=ByteTokenizer())
    check_vocabulary(served, words)
    words.tokenizer.token_bytes = lambda token: b"?" if token == 7 else bytes([token % 256])
    with pytest.raises(ConfigError, match=r"'words' has another vocabulary than 'served': token 7 is b'\?' instead"):
        check_vocabulary(served, words)
    with pytest.raises(ConfigError, match=rf"'tiny' has another .* 'served': 31 tokens instead of {VOCAB_SIZE}"):
        check_vocabulary(served, TinyCheckpoint())


def test_the_pages_of_a_draft_model_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack_serve.llm.limits.free_bytes", lambda devices: 2**25)
    served, large = TinyCheckpoint(max_positions=4096), EngineConfig(max_sequences=64)
    alone, both = (Limits.of(served, large, *draft).pages for draft in ([], [served]))
    assert 256 < both < alone
