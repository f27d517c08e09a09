"""This repository's engine, in process; runs in the environment that runs the benchmark.

Usage: python stack_engine.py HUGGING_FACE_DIR|RUN|FORMAT:PATH --workload NAME
"""

import threading
import time

from serving.worker import Arrivals, Stream, arguments, serve
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.runtime.huge_pages import restart_with_huge_pages
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine


def main() -> None:
    restart_with_huge_pages()  # as `stack serve` does
    options = arguments()
    workload = options.workload
    keep_compiled()
    config = EngineConfig(max_tokens=workload.prompt_tokens + workload.new_tokens)
    engine = LLMEngine(open_for_generation(options.model), config)
    engine.prepare()  # as `stack serve` does; the other programs are compiled before the requests of a round
    engine.start()

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        while engine.stats().programs_to_compile:
            time.sleep(0.1)
        calls = [_Call() for _ in prompts]
        for number, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
            request = GenerationRequest(request_id=str(number), prompt=tuple(prompt), sampling=sampling)
            engine.submit(request, call.receive)
        return [call.stream() for call in calls]

    serve(generate, workload)
    engine.close()


class _Call:
    """Collects the tokens of one continuation, on the engine's thread."""

    def __init__(self) -> None:
        self._stream = Stream([], [])
        self._done = threading.Event()

    def receive(self, update: GenerationUpdate) -> None:
        self._stream.tokens.extend(update.tokens)
        self._stream.times_s.extend([time.perf_counter()] * len(update.tokens))
        if update.finish_reason is not None:
            self._done.set()

    def stream(self) -> Stream:
        self._done.wait()
        return self._stream


if __name__ == "__main__":
    main()
