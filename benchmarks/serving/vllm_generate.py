"""vLLM's engine on a CPU, in process; runs in its own environment.

python vllm_generate.py HUGGING_FACE_DIR --workload NAME --dtype float32|bfloat16
"""

import os
import time

# Its log goes to standard output by default, where the answers are.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_STREAM="ext://sys.stderr"
)

from vllm import EngineArgs, LLMEngine, SamplingParams

from serving.worker import Arrivals, Stream, arguments, serve


def main() -> None:
    options = arguments("dtype")
    workload = options.workload
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=options.model,
            dtype=options.dtype,
            enforce_eager=True,  # compiling takes minutes on two cores
            max_model_len=workload.prompt_tokens + workload.new_tokens,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        streams = {str(number): Stream([], []) for number in range(len(prompts))}
        for name, prompt in zip(streams, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                stream = streams[output.request_id]
                tokens = output.outputs[0].token_ids[len(stream.tokens) :]
                stream.tokens.extend(tokens)
                stream.times_s.extend([now_s] * len(tokens))
        return list(streams.values())

    serve(generate, workload)


if __name__ == "__main__":
    main()
