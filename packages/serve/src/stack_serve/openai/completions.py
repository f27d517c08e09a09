"""`POST /v1/completions`: its answers."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from stack_core.generation import GenerationUpdate, TokenLogprob
from stack_serve.http.slices import Members, json_pieces
from stack_serve.openai.writer import Writer

__all__ = ["CompletionWriter"]


class CompletionWriter(Writer):
    """Writes texts, which may begin with their prompts."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, prompt: int, number: int) -> bytes:
        return b""

    def delta(self, prompt: int, number: int, update: GenerationUpdate, *, first: bool) -> Iterable[bytes]:
        """The text; the first of a continuation echoes the prompt, if that was asked for."""
        choice, job = self.choices[number], self.job
        text = job.echo[prompt] + update.text if job.echo and first else update.text
        offset, choice.characters = choice.characters, choice.characters + len(text)
        yield b'"text":%b,"logprobs":' % orjson.dumps(text)
        if job.wants_logprobs:
            new = update.logprobs or ()
            yield from json_pieces(self._logprobs(prompt, update.tokens, new, echo=first, offset=offset))
        else:
            yield b"null"
        tokens = b""
        if job.wants_token_ids and first:
            tokens = b'"prompt_token_ids":%b,' % orjson.dumps(job.prompts[prompt].tokens)
        yield b"," + tokens

    def whole_choice(self, prompt: int, number: int) -> dict[str, Any]:
        choice, job = self.choices[number], self.job
        logprobs = None
        if job.wants_logprobs:
            logprobs = self._logprobs(prompt, choice.tokens, choice.logprobs, echo=True, offset=0)
        text = (job.echo[prompt] if job.echo else "") + "".join(choice.text)
        return {"text": text, "logprobs": logprobs, **self.prompt_object(prompt)}

    def _logprobs(
        self, prompt: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, echo: bool, offset: int
    ) -> Members:
        """Those of new tokens, behind those of the prompt where it is echoed."""
        job = self.job
        if not (echo and job.echo):
            return job.texts.completion(logprobs, tokens, offset)
        every = [*self.prompt_logprobs[prompt], *logprobs]
        return job.texts.completion(every, [*job.prompts[prompt].tokens, *tokens], offset)
