"""`POST /v1/completions`: its answers."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from stack_core.abi.generation import GenerationUpdate, TokenLogprob
from stack_serve.http.slices import Members, batches, json_pieces
from stack_serve.openai.offsets import TextOffsets
from stack_serve.openai.serializer import Choice, Serializer

__all__ = ["CompletionSerializer"]

_DECODING_PARTS = 4  # 16 tokens at a time; each is decoded in the context of the previous ones


class CompletionSerializer(Serializer):
    """Writes texts, which may begin with their prompts."""

    response_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, prompt: int, number: int) -> bytes:
        return b""

    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """Returns the text of an update; the first update of a continuation may echo the prompt."""
        choice, request = self.choices[number], self.request
        text = request.echo[prompt] + update.text if request.echo and first else update.text
        yield b'"text":%b,"logprobs":' % orjson.dumps(text)
        if request.wants_logprobs:
            new = update.logprobs or ()
            yield from json_pieces(self._logprobs(prompt, choice, update.tokens, new, echo=first))
        else:
            yield b"null"
        tokens = b""
        if request.wants_token_ids and first:
            tokens = b'"prompt_token_ids":%b,' % orjson.dumps(request.prompts[prompt].tokens)
        yield b"," + tokens

    def choice_members(self, prompt: int, number: int) -> dict[str, Any]:
        choice, request = self.choices[number], self.request
        logprobs = None
        if request.wants_logprobs:
            logprobs = self._logprobs(prompt, choice, choice.tokens, choice.logprobs, echo=True)
        text = (request.echo[prompt] if request.echo else "") + "".join(choice.text)
        return {"text": text, "logprobs": logprobs, **self.prompt_object(prompt)}

    def _logprobs(
        self, prompt: int, choice: Choice, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, echo: bool
    ) -> Members:
        """Returns the log-probabilities of new tokens, after the prompt's if it is echoed."""
        request, before = self.request, self.request.prompts[prompt].tokens
        if choice.offsets is None:
            skip = request.sampling.skip_special_tokens
            text = request.echo[prompt] if request.echo else ""
            choice.offsets = TextOffsets(request.tokenizer, before, text, skip_special_tokens=skip)
        # A generator: the tokens are decoded between the pieces of the answer.
        new = (list(map(choice.offsets.push, batch)) for batch in batches(tokens, _DECODING_PARTS))
        if not (echo and request.echo):
            return request.texts.completion(logprobs, tokens, new)
        every = [*self.prompt_logprobs[prompt], *logprobs]
        offsets = itertools.chain(choice.offsets.of_prompt(batches(before, _DECODING_PARTS)), new)
        return request.texts.completion(every, [*before, *tokens], offsets)
