"""transformers' continuous batching; runs in PyTorch's environment.

    python torch_continuous.py HUGGING_FACE_DIR --workload NAME

`generate_batch` would make a cache and a thread for every call; here it keeps them, as a server does.
"""

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from serving.worker import Arrivals, Stream, arguments, serve

_BLOCKS = 64  # of 256 tokens; by default it takes most of the memory, and seconds to clear it


def main() -> None:
    options = arguments()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", attn_implementation="sdpa").eval()
    batching = ContinuousBatchingConfig(num_blocks=_BLOCKS)

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        made = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=batching,
            record_timestamps=True,
            persistent_manager=True,
        )
        return [Stream(output.generated_tokens, output.timestamps) for output in made.values()]

    serve(generate, options.workload)


if __name__ == "__main__":
    main()
