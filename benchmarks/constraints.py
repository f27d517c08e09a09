"""Cost of constrained decoding: one engine with and without constraints, in turns.

    nox -s bench -- constraints             # SmolLM2-135M-Instruct in Q4_1; writes results/constraints.md
    nox -s bench -- constraints MODEL       # prints the table of a model of yours

The requests of a round are answered three times: without a constraint, under a regular expression that allows any text,
and under a JSON Schema. The overhead of a step is measured within each round, as wall time and as CPU time of the
process.
"""

import argparse
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import RESULTS, circumstances, five_numbers, table, write
from serving.published import published_file

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
TITLES = {
    "free": "no constraint",
    "any text": "regular expression of any text",
    "schema": "JSON Schema of nested objects",
}


def main() -> None:
    restart_with_huge_pages()  # as `stack serve` does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="run, or FORMAT:PATH; none measures SmolLM2 and writes the results")
    parser.add_argument("--models", type=Path, help="folder that keeps SmolLM2 (a temporary one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="number of concurrent requests")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    keep_compiled()
    if options.model is not None:
        print("\n".join(_table(_measure(options.model, options))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.models is None else options.models
        found = _measure(f"gguf:{published_file(folder)}", options)
    versions = {package: version(package) for package in ("stack-core", "stack-serve", "stack-kernels", "jax")}
    versions["llguidance"] = version("llguidance")
    sizes = {name: getattr(options, name) for name in ("rounds", "rows", "new_tokens")}
    record = {**circumstances(), "versions": versions, "model": "SmolLM2-135M-Instruct in Q4_1", **sizes, **found}
    write(options.results, "constraints", record, _markdown(record))


def _measure(model: str, options: Any) -> dict[str, Any]:
    """Answers the requests of each round under each constraint.

    Returns:
      By constraint, the five numbers over the rounds of each figure. Overheads are in percent of the same round
      without a constraint.
    """
    checkpoint = open_for_generation(model)
    assert checkpoint.tokenizer is not None
    prompt = tuple(checkpoint.tokenizer.encode(TEXT))
    max_tokens = len(prompt) + options.new_tokens + 4
    engine = LLMEngine(checkpoint, EngineConfig(max_sequences=options.rows, max_tokens=max_tokens, decode_repeats=1))
    engine.warm_up()
    masks_s = _record_masks()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONSTRAINTS}
    with engine:
        for number in range(-1, options.rounds):
            # The order alternates, because the speed of a machine drifts.
            for name in sorted(CONSTRAINTS, reverse=number % 2 == 0):
                masks_s.clear()
                found = _generate(engine, prompt, CONSTRAINTS[name], options)
                found["masks_us_per_step"] = 1e6 * sum(masks_s) / found["steps"]
                if number >= 0:
                    rounds[name].append(found)
    figures: dict[str, Any] = {}
    for name, of in rounds.items():
        figures[name] = {figure: five_numbers([each[figure] for each in of]) for figure in of[0]}
        for figure in ("ms_per_step", "cpu_ms_per_step"):
            pairs = zip(of, rounds["free"], strict=True)
            percent = [100 * (one[figure] / free[figure] - 1) for one, free in pairs]
            figures[name][figure.replace("ms_per_step", "overhead_percent")] = five_numbers(percent)
    return {"constraints": figures}


def _record_masks() -> list[float]:
    """Records the time of each call of `ConstraintCompiler.masks`."""
    masks, took_s = ConstraintCompiler.masks, list[float]()

    def timed(self: ConstraintCompiler, matchers: Any) -> Any:
        started_s = time.perf_counter()
        found = masks(self, matchers)
        took_s.append(time.perf_counter() - started_s)
        return found

    ConstraintCompiler.masks = timed
    return took_s


def _generate(
    engine: LLMEngine, prompt: tuple[int, ...], constraint: Constraint | None, options: Any
) -> dict[str, float]:
    """Returns the speed of a round, from the submission of the requests to the last token."""
    before = engine.stats().steps
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for row in range(options.rows):
        settings: dict[str, Any] = {"max_tokens": options.new_tokens, "temperature": 0.8, "seed": row}
        sampling = SamplingParams(**settings, ignore_eos=True, constraint=constraint)
        engine.submit(GenerationRequest(request_id=f"{row}", prompt=prompt, sampling=sampling))
    tokens = sum(len(update.tokens) for row in range(options.rows) for update in engine.stream(f"{row}"))
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    steps = engine.stats().steps - before
    return {
        "tokens_per_s": tokens / took_s,
        "ms_per_step": 1e3 * took_s / steps,
        "cpu_ms_per_step": 1e3 * cpu_s / steps,
        "steps": steps,
    }


def _table(found: dict[str, Any]) -> list[str]:
    heading = ["", "tokens/s", "ms per step", "overhead of a step", "overhead in CPU time", "masks per step"]
    rows = [
        [
            TITLES[name],
            f"{of['tokens_per_s'][2]:.1f}",
            f"{of['ms_per_step'][2]:.2f}",
            *(["-"] * 3 if name == "free" else _overheads(of)),
        ]
        for name, of in found["constraints"].items()
    ]
    return table(heading, rows)


def _overheads(of: dict[str, list[float]]) -> list[str]:
    """Formats the overheads as "median % (least to most)", and the time for the masks."""
    overheads = (of[f"{kind}overhead_percent"] for kind in ("", "cpu_"))
    return [
        *(f"{each[2]:+.1f}% ({each[0]:+.1f} to {each[-1]:+.1f})" for each in overheads),
        f"{of['masks_us_per_step'][2]:.0f} us",
    ]


def _markdown(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items())
    lines = [
        "# Constrained decoding",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}. {record['model']}: medians of "
        f"{record['rounds']} rounds, in which one engine took turns without and with constraints; {record['rows']} "
        f"requests at once, {record['new_tokens']} tokens per answer, sampled at temperature 0.8, one token per "
        "launch. Overheads are within a round, with the least and the most.",
        "",
        *_table(record),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
