"""An engine without a model: a thread that makes up tokens, and does with a request what the contract says."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, EngineStopped, GenerationError
from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate, RequestTimes, TokenLogprob
from stack_core.text.detokenize import IncrementalDetokenizer, StopTexts

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if quiet %}(quietly) {% endif %}{% endif %}"
)
WORDS = ("hello", " world", " the", "\N{SNOWMAN}")
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS = 256, 257
VOCAB_SIZE = 256 + len(SPECIAL) + len(WORDS)
MAX_TOKENS = 256


class ByteTokenizer:
    """Bytes are tokens, so are some words and special texts; a text begins with the first of those."""

    vocab_size = VOCAB_SIZE
    eos_id = EOS
    bos_id = BOS

    def __init__(self) -> None:
        self._longer = {text: 256 + place for place, text in enumerate((*SPECIAL, *WORDS))}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = [BOS] if add_special_tokens else []
        while text:
            found = next((longer for longer in self._longer if text.startswith(longer)), None)
            tokens += [self._longer[found]] if found else text[0].encode()
            text = text[len(found or text[0]) :]
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self.token_bytes(i) for i in ids if not 256 <= i < 256 + len(SPECIAL)]
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else (*SPECIAL, *WORDS)[token - 256].encode()

    def save(self, directory: Path) -> None:
        raise NotImplementedError


def checkpoint(**changes: Any) -> Any:
    """A `GenerativeCheckpoint`, of which a server reads what describes the model."""
    parts = {
        **dict.fromkeys(("parameters", "states")),
        **dict.fromkeys(("model", "load_params", "shardings"), lambda given: given),
        "name": "tiny",
        "vocab_size": VOCAB_SIZE,
        "max_positions": MAX_TOKENS,
        "tokenizer": ByteTokenizer(),
        "end_tokens": frozenset({EOS}),
        "chat_template": TEMPLATE,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "sampling_defaults": {},
    }
    return SimpleNamespace(**{**parts, **changes})


def letters(request: GenerationRequest, index: int) -> Iterator[int]:
    """Tokens that depend on prompt, seed and number of the continuation."""
    state = repr((request.prompt, request.sampling.seed, index)).encode()
    while True:
        state = hashlib.sha256(state).digest()
        yield 97 + state[0] % 26


@dataclass(eq=False)
class _Continuation:
    request: GenerationRequest
    index: int
    receive: Callable[[GenerationUpdate], None]
    tokens: Iterator[int]
    detokenizer: IncrementalDetokenizer
    stop: StopTexts
    submitted_s: float = field(default_factory=time.monotonic)
    generated: int = 0


class FakeEngine(Engine):
    """Generates a token of every continuation in each step.

    Attributes:
      script: the tokens of a continuation.
      running: cleared, steps wait; set, they go on.
      submitted: all requests, in order.
      slept: levels of the calls of `sleep`, and 0 for each call of `wake_up`.
      embedded: prompts of each call of `embed`.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest, int], Iterator[int]] = letters,
        *,
        step_s: float = 0.0,
        most: int = 64,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.script = script
        self.running = threading.Event()
        self.running.set()
        self.submitted: list[GenerationRequest] = []
        self.slept: list[int] = []
        self.embedded: list[list[tuple[int, ...]]] = []
        self.steps = 0
        self.stopped = False
        self._step_s = step_s
        self._most = most
        self._max_tokens = max_tokens
        self._lock = threading.Condition()
        self._open: dict[tuple[str, int], _Continuation] = {}
        self._aborted: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def warm_up(self) -> None: ...

    def start(self) -> None:
        self._thread.start()

    def close(self, *, drain_s: float = 0.0) -> None:
        with self._lock:
            self.stopped = True
            self._lock.notify_all()
        self.running.set()
        self._thread.join()

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        sampling = request.sampling
        for name, most in {"logprobs": 20, "prompt_logprobs": 20, "n": 128}.items():
            if (getattr(sampling, name) or 0) > most:
                raise GenerationError(f"{name}={getattr(sampling, name)} is more than {most}.", parameter=name)
        if max(sampling.stop_tokens, default=0) >= VOCAB_SIZE:
            raise GenerationError(f"stop_tokens has {max(sampling.stop_tokens)}.", parameter="stop_tokens")
        assert receive is not None, "the server hands over a function"
        with self._lock:
            if self.stopped:
                raise EngineStopped("The engine was closed.")
            if len(self._open) + sampling.n > self._most:
                raise EngineBusy("The queue is full.", retry_after_s=1.5)
            self.submitted.append(request)
            for index in range(sampling.n):
                detokenizer = IncrementalDetokenizer(
                    ByteTokenizer(), request.prompt, skip_special_tokens=sampling.skip_special_tokens
                )
                tokens = self.script(request, index)
                made = _Continuation(request, index, receive, tokens, detokenizer, StopTexts(sampling.stop))
                self._open[request.request_id, index] = made
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborted.add(request_id)
            self._lock.notify_all()

    def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Any = "last") -> np.ndarray:
        """Has the vector of a prompt depend on the number of its tokens and on its last token."""
        self.embedded.append([tuple(prompt) for prompt in prompts])
        self.running.wait(60)
        return np.array([[3.0, len(prompt), prompt[-1] / 7, pooling == "mean"] for prompt in prompts], np.float32)

    def sleep(self, level: Any = 1) -> None:
        self.running.wait(60)
        if self._open:
            raise EngineBusy("1 requests run.", retry_after_s=1.0)
        self.slept.append(level)

    def wake_up(self) -> None:
        self.slept.append(0)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        raise NotImplementedError

    def update_weights(self, params: Any, *, version: Any = None, kv: Any = "keep", donate: bool = False) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        if self.stopped:
            raise EngineStopped("The engine was closed.")
        used = len(self._open)
        return EngineStats(
            running=used, waiting=0, used_pages=used, pages=64, steps=self.steps, prompt_tokens=11, generated_tokens=22,
            prefix_queries_tokens=33, prefix_hits_tokens=4, preemptions=5, compilations=0,
            drafts=6, drafted_tokens=30, accepted_tokens=18, programs_to_compile=7,
        )  # fmt: skip

    def _run(self) -> None:
        while not self.stopped:
            with self._lock:
                self._lock.wait_for(lambda: self.stopped or bool(self._open))
            self.running.wait(0.01)
            with self._lock:
                for made in list(self._open.values()):
                    update = self._update(made)
                    if update is not None:
                        if update.finish_reason is not None:
                            del self._open[made.request.request_id, made.index]
                        made.receive(update)
                self.steps += 1
            time.sleep(self._step_s)

    def _update(self, made: _Continuation) -> GenerationUpdate | None:
        request, overdue = made.request, made.request.timeout_s is not None
        if request.request_id in self._aborted:
            return self._end(made, "abort")
        if overdue and time.monotonic() - made.submitted_s > (request.timeout_s or 0):
            return self._end(made, "deadline")
        if not self.running.is_set():
            return None
        try:
            return self._next(made)
        except ArithmeticError as error:
            return self._end(made, "error", error=str(error))

    def _end(self, made: _Continuation, reason: Any, **more: Any) -> GenerationUpdate:
        now_s = time.monotonic()
        times = RequestTimes(made.submitted_s, made.submitted_s, now_s if made.generated else None, now_s)
        name, index = made.request.request_id, made.index
        return GenerationUpdate(request_id=name, index=index, finish_reason=reason, times=times, **more)

    def _next(self, made: _Continuation) -> GenerationUpdate:
        request, sampling = made.request, made.request.sampling
        token = next(made.tokens)
        made.generated += 1
        ends = token == EOS and not sampling.ignore_eos
        text = made.stop.push("" if ends else made.detokenizer.push(token))
        reason: Any = "stop" if ends or token in sampling.stop_tokens or made.stop.found is not None else None
        room = self._max_tokens - len(request.prompt)
        if reason is None and made.generated == min(sampling.max_tokens or room, room):
            reason = "length"
        if reason is not None:
            text += made.stop.push(made.detokenizer.flush()) + made.stop.flush()
        update = self._end(made, reason)
        first = made.index == 0 and made.generated == 1
        known = {
            "tokens": (token,),
            "text": text,
            "logprobs": None if sampling.logprobs is None else (_logprob(token, sampling.logprobs),),
            "cached_tokens": 1 if first else 0,
            "stop_reason": made.stop.found or (token if token in sampling.stop_tokens else None),
            "times": update.times if reason else None,
        }
        if first and sampling.prompt_logprobs is not None:
            rest = [_logprob(each, sampling.prompt_logprobs) for each in request.prompt[1:]]
            known["prompt_logprobs"] = (None, *rest)
        return GenerationUpdate(**{**vars(update), **known})


def _logprob(token: int, wanted: int) -> TokenLogprob:
    """A token is the second most likely; its neighbours are around it."""
    top = ((token - 1, -0.25), (token, -0.5), *((token + step, -0.5 - step) for step in range(1, 30)))
    return TokenLogprob(token, -0.5, 2, top[:wanted])
