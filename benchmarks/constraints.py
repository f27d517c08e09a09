"""Cost of constrained decoding: the same engine with and without constraints, in turns.

The requests of a round are answered three times: without a constraint, under a regular expression that allows any text,
and under a JSON Schema. Answers under the first two need not be equal: special tokens are excluded, and
the programs may differ in the last bits. The results are tokens per second, CPU time per step, and the time in which
the host computes the masks of a step.

Usage: python benchmarks/constraints.py MODEL [--rounds 5] [--rows 8] [--new-tokens 128] [--json FILE]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from stack_core.abi.generation import Constraint, GenerationRequest, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.runtime.huge_pages import restart_with_huge_pages
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.constraints import ConstraintCompiler
from stack_serve.llm.engine import LLMEngine

TEXT = "The keeper of the lighthouse counted the ships of the day, and wrote their names into a book:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "ships": {
            "type": "array",
            "minItems": 20,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "tons": {"type": "integer"}, "home": {"enum": ["a", "b"]}},
                "required": ["name", "tons", "home"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "ships"],
    "additionalProperties": False,
}
CONSTRAINTS = {"free": None, "any text": Constraint(regex=r"(?s:.*)"), "schema": Constraint(json_schema=SCHEMA)}


def main() -> None:
    restart_with_huge_pages()  # as `stack serve` does
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="run, or FORMAT:PATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="number of concurrent requests")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    keep_compiled()
    checkpoint = open_for_generation(options.model)
    assert checkpoint.tokenizer is not None
    prompt = tuple(checkpoint.tokenizer.encode(TEXT))
    max_tokens = len(prompt) + options.new_tokens + 4
    engine = LLMEngine(checkpoint, EngineConfig(max_sequences=options.rows, max_tokens=max_tokens, decode_repeats=1))
    engine.warm_up()
    masks_s = _measure_masks()
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in CONSTRAINTS}
    answers: dict[str, Any] = {}
    with engine:
        for number in range(-1, options.rounds):
            # The order alternates, because the speed of a machine drifts.
            for name in sorted(CONSTRAINTS, reverse=number % 2 == 0):
                masks_s.clear()
                found, answers[name] = _generate(engine, prompt, name, options)
                found["masks_us_per_step"] = 1e6 * sum(masks_s) / found["steps"]
                if number >= 0:
                    for figure, value in found.items():
                        figures[name].setdefault(figure, []).append(value)
    results = {name: {figure: statistics.median(each) for figure, each in of.items()} for name, of in figures.items()}
    for name, of in results.items():
        pairs = zip(figures[name]["cpu_ms_per_step"], figures["free"]["cpu_ms_per_step"], strict=True)
        of["cpu_ratio"] = statistics.median(one / free for one, free in pairs)
        of["equal_answers"] = sum(one == free for one, free in zip(answers[name], answers["free"], strict=True))
        print(f"{name}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in of.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


def _measure_masks() -> list[float]:
    """Records the time of each call of `ConstraintCompiler.masks`."""
    masks, took_s = ConstraintCompiler.masks, list[float]()

    def timed(self: ConstraintCompiler, matchers: Any) -> Any:
        started_s = time.perf_counter()
        found = masks(self, matchers)
        took_s.append(time.perf_counter() - started_s)
        return found

    ConstraintCompiler.masks = timed
    return took_s


def _generate(engine: LLMEngine, prompt: tuple[int, ...], name: str, options: Any) -> tuple[dict[str, float], Any]:
    before = engine.stats().steps
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for row in range(options.rows):
        settings = {"max_tokens": options.new_tokens, "temperature": 0.8, "seed": row, "ignore_eos": True}
        sampling = SamplingParams(**settings, constraint=CONSTRAINTS[name])
        engine.submit(GenerationRequest(request_id=f"{row}", prompt=prompt, sampling=sampling))
    answers = [[token for update in engine.stream(f"{row}") for token in update.tokens] for row in range(options.rows)]
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    steps = engine.stats().steps - before
    tokens_per_s = sum(map(len, answers)) / took_s
    return {"tokens_per_s": tokens_per_s, "cpu_ms_per_step": 1e3 * cpu_s / steps, "steps": steps}, answers


if __name__ == "__main__":
    main()
