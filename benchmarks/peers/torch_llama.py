"""Trains transformers' Llama with PyTorch on the CPU; runs inside PyTorch's own environment.

Prints `completed step: N` as each step completes. Every step takes a fresh batch of random tokens.
"""

import argparse
import contextlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Trains for `--steps` steps at the sizes of the command line."""
    parser = argparse.ArgumentParser()
    for name in ("layers", "embed", "heads", "mlp", "vocab", "seq", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    sizes = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.embed,
            intermediate_size=sizes.mlp,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            max_position_embeddings=sizes.seq,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if sizes.dtype == "bfloat16" else contextlib.nullcontext()
    for step in range(sizes.steps):
        tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq))
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"completed step: {step}, loss: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
