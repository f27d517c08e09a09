"""Speed of speculative decoding, relative to the same engine without it.

    nox -s bench -- speculation                                 # the cases below; writes results/speculation.md
    nox -s bench -- speculation MODEL --rows 8                  # prompt lookup with a model of yours
    nox -s bench -- speculation MODEL --draft-model SMALL       # or --mtp
    nox -s bench -- speculation --cases mtp                     # some of the cases

Without MODEL there is a case for each method: prompt lookup with SmolLM2-135M-Instruct in Q4_1, the float32 weights of
that model drafted by its Q4_1 file, and a small GLM with a multi-token prediction layer, which is trained here.

Two engines of one model, with and without speculation, take turns in one process. They answer the same requests: edits
of source code, whose answers repeat the prompt, and stories sampled at temperature 1, whose answers repeat little. The
answers of both engines must be equal in float32; in bfloat16 a near-tie may be decided differently.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import RESULTS, circumstances, table, write
from serving.published import published_file
from serving.trained import write_mtp_run

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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A served model and a method that drafts for it.

    Attributes:
      title: name in the table of results.
      model: address of the served model.
      method: method of speculation.
      draft_model: address of the model that drafts.
      dequantize: True reads quantized weights as floats.
    """

    title: str
    model: str
    method: Any
    draft_model: str | None = None
    dequantize: bool = False


def _lookup_case(folder: Path) -> Case:
    return Case(title="prompt lookup, SmolLM2 in Q4_1", model=f"gguf:{published_file(folder)}", method="ngram")


def _draft_case(folder: Path) -> Case:
    file = f"gguf:{published_file(folder)}"
    title = "SmolLM2 in float32 drafted by its Q4_1 file"
    return Case(title=title, model=file, method="draft", draft_model=file, dequantize=True)


def _mtp_case(folder: Path) -> Case:
    return Case(title="small GLM's multi-token layer", model=str(write_mtp_run(folder)), method="mtp")


CASES: dict[str, Callable[[Path], Case]] = {"ngram": _lookup_case, "draft": _draft_case, "mtp": _mtp_case}


def main() -> None:
    restart_with_huge_pages()  # as `stack serve` does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="run, or FORMAT:PATH of a model; none measures the cases")
    parser.add_argument("--draft-model", help="small model that drafts, instead of prompt lookup")
    parser.add_argument("--mtp", action="store_true", help="draft with the model's own layer, instead of prompt lookup")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", type=Path, help="folder that keeps the models of the cases (a temporary one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="number of concurrent requests")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=7, help="maximum number of drafted tokens")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.mtp and options.draft_model is not None:
        parser.error("--mtp and --draft-model are two methods; choose one")
    if options.model is None and (options.mtp or options.draft_model is not None):
        parser.error("--mtp and --draft-model need a MODEL; --cases chooses among the cases")
    keep_compiled()
    if options.model is not None:
        method = "mtp" if options.mtp else "ngram" if options.draft_model is None else "draft"
        found = _measure(
            Case(title=method, model=options.model, method=method, draft_model=options.draft_model), options
        )
        print("\n".join(_table({method: found})))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.models is None else options.models
        results = {}
        for name in options.cases:
            case = CASES[name](folder)
            results[case.title] = _measure(case, options)
            print("\n".join(_table({case.title: results[case.title]})), flush=True)
    versions = {package: version(package) for package in ("stack-core", "stack-serve", "stack-kernels", "jax")}
    sizes = {name: getattr(options, name) for name in ("rounds", "rows", "new_tokens", "tokens")}
    record = {**circumstances(), "versions": versions, **sizes, "cases": results}
    write(options.results, "speculation", record, _markdown(record))


def _measure(case: Case, options: Any) -> dict[str, Any]:
    """Measures a case with each kind of prompts."""
    checkpoint = open_for_generation(case.model)
    assert checkpoint.tokenizer is not None
    prompts = {"code edits": _encode(checkpoint, EDITS), "stories": _encode(checkpoint, STORIES)}
    longest = max(len(prompt) for each in prompts.values() for prompt in each)
    engines = {}
    for name, speculation in (("off", None), ("on", SpeculationConfig(method=case.method, tokens=options.tokens))):
        config = EngineConfig(
            max_sequences=options.rows,
            max_tokens=longest + options.new_tokens,
            step_tokens=256,
            dequantize=case.dequantize,
            speculation=speculation,
            draft_model=None if speculation is None else case.draft_model,
        )
        engines[name] = LLMEngine(checkpoint, config)
        # All programs, because prompts that hit the prefix cache, and drafts, need others in later rounds.
        engines[name].warm_up()
        engines[name].start()
    try:
        return {kind: _compare(engines, kind, each, options) for kind, each in prompts.items()}
    finally:
        for engine in engines.values():
            engine.close()


def _table(cases: dict[str, Any]) -> list[str]:
    heading = ["", "tokens/s without", "with", "ratio (least to most)", "accepted drafts", "equal answers"]
    rows = [
        [
            f"{title}, {kind}",
            f"{found['off']:.1f}",
            f"{found['on']:.1f}",
            f"{found['ratio']:.2f} ({found['low']:.2f} to {found['high']:.2f})",
            f"{found['accepted_tokens']} of {found['drafted_tokens']}",
            f"{found['equal']} of {found['answers']}",
        ]
        for title, kinds in cases.items()
        for kind, found in kinds.items()
    ]
    return table(heading, rows)


def _markdown(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{name} {each}" for name, each in record["versions"].items())
    lines = [
        "# Speculative decoding",
        "",
        f"{record['date']}, {machine['cpus']} CPUs of {machine['cpu']}; {versions}. Medians of {record['rounds']} "
        f"rounds in which two engines took turns, with and without speculation; {record['rows']} at once, "
        f"{record['new_tokens']} tokens per answer, up to {record['tokens']} drafted tokens. Code edits are greedy, "
        "stories sampled at temperature 1. Without accepted drafts both do the same work, and the ratio is noise.",
        "",
        *_table(record["cases"]),
    ]
    return "\n".join(lines) + "\n"


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
