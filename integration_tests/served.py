"""`stack serve` of a tiny Llama with random weights, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx2
import numpy as np
import openai
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

__all__ = ["KEY", "Served", "write_checkpoint"]

KEY = "sk-of-the-test"
VOCAB, EMBED, MLP, POSITIONS = 320, 32, 64, 512
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_checkpoint(directory: Path) -> None:
    source = np.random.default_rng(7)

    def random(*shape: int) -> np.ndarray:
        return source.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": random(VOCAB, EMBED), "lm_head.weight": 3 * random(VOCAB, EMBED)}
    tensors["model.norm.weight"] = np.ones(EMBED, np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, outputs in (("q", EMBED), ("k", EMBED // 2), ("v", EMBED // 2), ("o", EMBED)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(outputs, EMBED)
        for name, outputs, inputs in (("gate", MLP, EMBED), ("up", MLP, EMBED), ("down", EMBED, MLP)):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = random(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(EMBED, np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Bytes and a few pairs of them; a text begins with "<s>"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left in "abcdef" for right in "abcdefgh"]
    tokens = [*SPECIAL, *letters, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


class Served:
    """`stack serve` of a directory.

    Args:
      under: arguments of Python that come before the module, such as those of what runs it.
      variables: of its environment, beside ours.
    """

    def __init__(
        self,
        directory: Path | str,
        *options: str,
        python: str = sys.executable,
        under: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        serve = ["-m", "stack_core", "serve", str(directory), "--port", "0", "--json", *options]
        command = [python, *under, *serve]
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.address: str = json.loads(line)["address"]
        self.model: str = json.loads(line)["model"]
        self.openai = openai.OpenAI(base_url=f"{self.address}/v1", api_key=KEY, max_retries=0, timeout=180)

    def metrics(self) -> str:
        return httpx2.get(f"{self.address}/metrics").text

    def metric(self, name: str) -> float:
        (line,) = (line for line in self.metrics().splitlines() if line.startswith(f"{name}{{"))
        return float(line.rpartition(" ")[2])

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline_s = time.monotonic() + 180
        while self.metric(name) != value:
            assert time.monotonic() < deadline_s, f"{name} is {self.metric(name)}"
            time.sleep(0.01)

    def stop(self) -> str:
        """Ends the server; returns what it wrote to standard error."""
        self.openai.close()
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=180)
        assert self.process.returncode == 0, errors
        return errors
