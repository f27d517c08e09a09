"""llama.cpp through its C functions, all sequences in one batch; runs in its own environment.

python llama_cpp_generate.py MODEL.gguf --workload NAME
"""

import ctypes
import os
import time
from pathlib import Path

import llama_cpp
import numpy as np

from serving.worker import Arrivals, Stream, arguments, serve
from serving.workload import Workload

_BATCHES = (1, 8, 32)


def main() -> None:
    options = arguments()
    workload = options.workload
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        settings.use_extra_bufts = False  # with its buffers for AMX it crashes on prompts of int8 models
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), settings)
    cores = len(os.sched_getaffinity(0))
    engines = {batch: _Context(model, batch, cores, workload) for batch in _BATCHES}

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        return engines[len(prompts)].generate(prompts, new_tokens)

    serve(generate, workload)


class _Context:
    """A context for so many sequences: its attention is over as many cells as there can be."""

    def __init__(self, model: ctypes.c_void_p, sequences: int, cores: int, workload: Workload) -> None:
        self._vocab = workload.vocab
        total_tokens = sequences * (workload.prompt_tokens + workload.new_tokens)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = total_tokens
        settings.n_seq_max = sequences
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = cores
        settings.no_perf = True
        self._step_tokens = settings.n_batch
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._batch = llama_cpp.llama_batch_init(self._step_tokens, 0, 1)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Arrivals:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        streams = [Stream([], []) for _ in prompts]
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), self._step_tokens):
            self._step(rows[start : start + self._step_tokens], streams)
        for _ in range(new_tokens - 1):
            positions = (len(prompt) + len(stream.tokens) - 1 for prompt, stream in zip(prompts, streams, strict=True))
            last = [stream.tokens[-1] for stream in streams]
            self._step([(row, position, last[row], True) for row, position in enumerate(positions)], streams)
        return streams

    def _step(self, rows: list[tuple[int, int, int, bool]], streams: Arrivals) -> None:
        """Computes (sequence, position, token, whether to sample) rows, and appends what is sampled."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for place, (sequence, position, token, samples) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, samples
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        sampled = [(place, sequence) for place, (sequence, _, _, samples) in enumerate(rows) if samples]
        for place, sequence in sampled:
            logits = llama_cpp.llama_get_logits_ith(self._context, place)
            streams[sequence].tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        now_s = time.perf_counter()
        for _, sequence in sampled:
            streams[sequence].times_s.append(now_s)


if __name__ == "__main__":
    main()
