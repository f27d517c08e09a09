"""`POST /v1/completions`: its answers."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from stack_core.abi.generation import GenerationUpdate, TokenLogprob
from stack_serve.http.slices import Members, batches, json_pieces
from stack_serve.openai.offsets import TextOffsets
from stack_serve.openai.writer import Choice, Writer

__all__ = ["CompletionWriter"]

_DECODING_PARTS = 4  # 16 tokens at a time; each is decoded in the context of the previous ones


class CompletionWriter(Writer):
    """Writes texts, which may begin with their prompts."""

    response_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, prompt: int, number: int) -> bytes:
        return b""

    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """Returns the text of an update; the first update of a continuation may echo the prompt."""
        choice, job = self.choices[number], self.job
        text = job.echo[prompt] + update.text if job.echo and first else update.text
        yield b'"text":%b,"logprobs":' % orjson.dumps(text)
        if job.wants_logprobs:
            new = update.logprobs or ()
            yield from json_pieces(self._logprobs(prompt, choice, update.tokens, new, echo=first))
        else:
            yield b"null"
        tokens = b""
        if job.wants_token_ids and first:
            tokens = b'"prompt_token_ids":%b,' % orjson.dumps(job.prompts[prompt].tokens)
        yield b"," + tokens

    def choice_members(self, prompt: int, number: int) -> dict[str, Any]:
        choice, job = self.choices[number], self.job
        logprobs = None
        if job.wants_logprobs:
            logprobs = self._logprobs(prompt, choice, choice.tokens, choice.logprobs, echo=True)
        text = (job.echo[prompt] if job.echo else "") + "".join(choice.text)
        return {"text": text, "logprobs": logprobs, **self.prompt_object(prompt)}

    def _logprobs(
        self, prompt: int, choice: Choice, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, echo: bool
    ) -> Members:
        """Returns the log-probabilities of new tokens, after the prompt's if it is echoed."""
        job, before = self.job, self.job.prompts[prompt].tokens
        if choice.offsets is None:
            skip = job.sampling.skip_special_tokens
            text = job.echo[prompt] if job.echo else ""
            choice.offsets = TextOffsets(job.tokenizer, before, text, skip_special_tokens=skip)
        # A generator: the tokens are decoded between the pieces of the answer.
        new = (list(map(choice.offsets.push, batch)) for batch in batches(tokens, _DECODING_PARTS))
        if not (echo and job.echo):
            return job.texts.completion(logprobs, tokens, new)
        every = [*self.prompt_logprobs[prompt], *logprobs]
        offsets = itertools.chain(choice.offsets.of_prompt(batches(before, _DECODING_PARTS)), new)
        return job.texts.completion(every, [*before, *tokens], offsets)
