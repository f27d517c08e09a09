"""Speed of speculative decoding by prompt lookup or a draft model, relative to the same engine without it.

Two engines of one model, with and without speculation, take turns in one process. They answer the same requests: edits
of source code, whose answers repeat the prompt, and stories sampled at temperature 1, whose answers repeat little. The
greedy answers of both engines must be equal in float32; in bfloat16 a near-tie may be decided differently.

Usage: python benchmarks/speculation.py MODEL [--draft-model SMALL] [--rounds 5] [--rows 1] [--new-tokens 128]
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.runtime.huge_pages import restart_with_huge_pages
from stack_core.text.chat_template import ChatTemplate
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine

SOURCE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""
EDITS = [
    f"Rename the method {old} to {new} in this code. Answer with the complete code only.\n\n```python\n{SOURCE}```"
    for old, new in (("push", "add"), ("pop", "remove"), ("peek", "top"), ("items", "values"))
]
STORIES = [f"Tell a story about {topic}." for topic in ("a lighthouse", "two rivers", "an old clock", "the first snow")]


def main() -> None:
    restart_with_huge_pages()  # as `stack serve` does
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="run, or FORMAT:PATH of a chat model")
    parser.add_argument("--draft-model", help="small model that drafts, instead of prompt lookup")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="number of concurrent requests")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=7, help="maximum number of drafted tokens")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    keep_compiled()
    checkpoint = open_for_generation(options.model)
    assert checkpoint.tokenizer is not None
    prompts = {"code edits": _encode(checkpoint, EDITS), "stories": _encode(checkpoint, STORIES)}
    longest = max(len(prompt) for each in prompts.values() for prompt in each)
    engines = {}
    method = "ngram" if options.draft_model is None else "draft"
    for name, speculation in (("off", None), ("on", SpeculationConfig(method=method, tokens=options.tokens))):
        config = EngineConfig(
            max_sequences=options.rows,
            max_tokens=longest + options.new_tokens,
            step_tokens=512,
            speculation=speculation,
            draft_model=None if speculation is None else options.draft_model,
        )
        engines[name] = LLMEngine(checkpoint, config)
        # All programs, because prompts that hit the prefix cache, and drafts, need others in later rounds.
        engines[name].warm_up()
        engines[name].start()
    results = {kind: _compare(engines, kind, each, options) for kind, each in prompts.items()}
    for kind, result in results.items():
        print(
            f"{kind}, {options.rows} rows: {result['off']:.1f} tokens/s without, {result['on']:.1f} with speculation, "
            f"ratio {result['ratio']:.2f} ({result['low']:.2f} to {result['high']:.2f}); accepted "
            f"{result['accepted_tokens']} of {result['drafted_tokens']} drafted tokens; "
            f"{result['equal']} of {result['answers']} answers equal"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))
    for engine in engines.values():
        engine.close()


def _encode(checkpoint: Any, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Renders each text as a message of the model's chat template; without one, the text itself is the prompt."""
    if checkpoint.chat_template is None:
        return [tuple(checkpoint.tokenizer.encode(text)) for text in texts]
    template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
    rendered = (template.render([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts)
    return [tuple(checkpoint.tokenizer.encode(text, add_special_tokens=False)) for text in rendered]


def _compare(engines: dict[str, LLMEngine], kind: str, prompts: list[tuple[int, ...]], options: Any) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    equal = answers = 0
    before = engines["on"].stats()
    for number in range(-1, options.rounds):
        found = {}
        # The order alternates, because the speed of a machine drifts.
        for name in sorted(engines, reverse=number % 2 == 0):
            seconds, tokens, found[name] = 0.0, 0, []
            for start in range(0, len(prompts), options.rows):
                chosen = [prompts[(start + row) % len(prompts)] for row in range(options.rows)]
                took_s, outputs = _generate(engines[name], kind, chosen, options.new_tokens, number)
                seconds, tokens = seconds + took_s, tokens + sum(map(len, outputs))
                found[name] += outputs
            if number >= 0:
                speeds[name].append(tokens / seconds)
        answers += len(found["on"])
        equal += sum(one == other for one, other in zip(found["on"], found["off"], strict=True))
    ratios = sorted(on / off for on, off in zip(speeds["on"], speeds["off"], strict=True))
    after = engines["on"].stats()
    return {
        "off": statistics.median(speeds["off"]),
        "on": statistics.median(speeds["on"]),
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "drafted_tokens": after.drafted_tokens - before.drafted_tokens,
        "accepted_tokens": after.accepted_tokens - before.accepted_tokens,
        "equal": equal,
        "answers": answers,
    }


def _generate(
    engine: LLMEngine, kind: str, prompts: list[tuple[int, ...]], new_tokens: int, number: int
) -> tuple[float, list[list[int]]]:
    """Returns the time from the submission of the requests to the last token, and the tokens of each answer."""
    temperature = 0.0 if kind == "code edits" else 1.0
    sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=number + 1)
    started_s = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(request_id=str(row), prompt=prompt, sampling=sampling))
    streams = (engine.stream(str(row)) for row in range(len(prompts)))
    outputs = [[token for update in stream for token in update.tokens] for stream in streams]
    return time.perf_counter() - started_s, outputs


if __name__ == "__main__":
    main()
