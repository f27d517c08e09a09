"""A language model in this process, as the Language Model Evaluation Harness calls it.

The harness is lm_eval of EleutherAI (Gao et al., 2024, https://zenodo.org/records/12608602).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from stack_core.abi.config import parse
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import SamplingParams
from stack_core.text.chat_template import ChatTemplate
from stack_serve.llm.language_model import LLM

__all__ = ["HarnessModel"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SCORES = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
_ANSWER_TOKENS = 256  # of tasks that state no limit, as in the harness


class HarnessModel:
    """The methods of the harness's `TemplateLM` that score texts and generate answers, with an `LLM`.

    `evaluate_model` makes a class of both: lm_eval is an optional dependency, so this one cannot inherit from it.

    Args:
      llm: the model.
      checkpoint: the checkpoint that `llm` was opened from.
      adapter: name of an adapter; None selects the base model.

    Raises:
      GenerationError: the checkpoint has no tokenizer.
    """

    def __init__(self, llm: LLM, checkpoint: GenerativeCheckpoint, *, adapter: str | None = None) -> None:
        super().__init__()
        if checkpoint.tokenizer is None:
            raise GenerationError(f"{checkpoint.name} has no tokenizer, and the texts of benchmarks need one.")
        self._llm, self._checkpoint, self._adapter, self._texts = llm, checkpoint, adapter, checkpoint.tokenizer

    @property
    def eot_token_id(self) -> int:
        if self._texts.eos_id is not None:
            return self._texts.eos_id
        if self._checkpoint.end_tokens:
            return min(self._checkpoint.end_tokens)
        raise GenerationError(f"{self._checkpoint.name} has no token that ends a text, which these tasks need.")

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        return self.eot_token_id if self._texts.bos_id is None else self._texts.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._checkpoint.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenizes a text. By default, special tokens are added unless the text begins with one, as chats do."""
        begin = self._checkpoint.special_tokens.get("bos_token")
        adds = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
        return list(self._texts.encode(string, add_special_tokens=adds))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._checkpoint.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders messages; without `add_generation_prompt`, the model continues the last one."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        return self._template.render(chat_history, **options)

    @cached_property
    def _template(self) -> ChatTemplate:
        source = self._checkpoint.chat_template
        if source is None:
            raise GenerationError(f"{self._checkpoint.name} has no chat template. Evaluate it without --chat.")
        return ChatTemplate(source, self._checkpoint.special_tokens)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, longer ones in windows that overlap by one token."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # optional, as below

        pieces, owners = list[tuple[None, list[int], list[int]]](), list[int]()
        for number, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._llm.max_tokens - 1,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pieces.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(pieces), strict=True):
            sums[owner] += logprob
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether greedy decoding would have generated it.

        Contexts lose their first tokens if they are longer than the model's positions.
        """
        most = self._llm.max_tokens - 1  # the engine generates a token
        prompts = [(context + continuation)[-most:] for _, context, continuation in requests]
        found = list[tuple[float, bool]]()
        outputs = self._llm.generate(prompts, _SCORES, adapter=self._adapter) if prompts else []
        for output, (*_given, continuation) in zip(outputs, requests, strict=True):
            scores = [score for score in (output.prompt_logprobs or ())[-len(continuation) :] if score is not None]
            found.append((sum(score.logprob for score in scores), all(score.rank == 1 for score in scores)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates an answer to each prompt, up to a stop text or a limit of tokens."""
        prompts, sampling = list[list[int]](), list[SamplingParams]()
        for request in requests:
            prompt, settings = request.args
            each = self._sampling(settings)
            kept = self._llm.max_tokens - (each.max_tokens or 0)
            if kept < 1:
                raise GenerationError(
                    f"Task {request.task_name} generates up to {each.max_tokens} tokens, which leave no room for a "
                    f"prompt: the engine's limit is {self._llm.max_tokens} tokens."
                )
            prompts.append(self.tok_encode(prompt)[-kept:])
            sampling.append(each)
        outputs = self._llm.generate(prompts, sampling, adapter=self._adapter) if prompts else []
        return [output.text for output in outputs]

    def _sampling(self, settings: Mapping[str, Any]) -> SamplingParams:
        from lm_eval.models.utils import normalize_gen_kwargs

        known = normalize_gen_kwargs(dict(settings), default_max_gen_toks=_ANSWER_TOKENS)
        until, max_tokens = known.pop("until"), known.pop("max_gen_toks")
        known.pop("do_sample", None)  # has set the temperature
        if foreign := sorted(set(known).difference(_SAMPLING)):
            raise GenerationError(
                f"A task sets {', '.join(foreign)} for generation, which engines here do not have; they have "
                f"{', '.join(_SAMPLING)}, until and max_gen_toks. Change the task's generation_kwargs."
            )
        stop = tuple(text for text in until if text)
        return parse(SamplingParams, {**known, "max_tokens": max_tokens, "stop": stop})
