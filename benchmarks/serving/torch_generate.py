"""transformers' `generate` on PyTorch, eager or compiled with a static cache; runs in PyTorch's environment.

python torch_generate.py HUGGING_FACE_DIR --workload NAME --mode eager|compiled
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, StoppingCriteria, StoppingCriteriaList

from serving.worker import Arrivals, Stream, arguments, serve


class _Clock(StoppingCriteria):
    """Notes when each token is there; `generate` asks after every step whether to stop."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    options = arguments("mode")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", attn_implementation="sdpa").eval()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if options.mode == "compiled":
        compile_config = CompileConfig(fullgraph=False, dynamic=False, mode="default")
        compile_config._compile_all_devices = True  # else only accelerators are compiled for
        settings |= {"cache_implementation": "static", "compile_config": compile_config}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        clock = _Clock()
        tokens = torch.tensor(prompts)
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new_tokens,
            min_new_tokens=None,
            stopping_criteria=StoppingCriteriaList([clock]),
            **settings,
        )
        return [Stream(row, clock.times_s) for row in made[:, tokens.shape[1] :].tolist()]

    serve(generate, options.workload)


if __name__ == "__main__":
    main()
