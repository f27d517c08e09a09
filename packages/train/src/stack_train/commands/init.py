"""`stack init`: a commented config file for a first run, with example data."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from stack_core.abi.errors import ConfigError

__all__ = ["init"]

Kind = Literal["llm", "chat", "lora", "dpo", "grpo", "diffusion", "vision"]

_DATA: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chat": ("chats.jsonl", "chat.jinja"),
        "lora": ("chats.jsonl", "chat.jinja"),
        "dpo": ("pairs.jsonl",),
        "grpo": ("tasks.jsonl",),
        "vision": ("pictures.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
    }
)
_STARTS = MappingProxyType({"chat": "llm", "lora": "llm", "dpo": "chat", "grpo": "chat"})


def init(kind: Kind, /, *, directory: Path = Path()) -> None:
    """Write a commented config for a first run: stack init llm && stack train llm.yaml

    Example data is written to the same directory; replace the data with yours. Nothing is overwritten.

    Args:
      kind: llm: pretraining on text; chat: fine-tuning on conversations; lora: adapters; dpo: preferences; grpo:
        reinforcement learning; diffusion: image generation; vision: chats with images.
      directory: directory of the files.
    """
    config, data = f"{kind}.yaml", _DATA.get(kind, ())
    if (directory / config).exists():
        raise ConfigError(f"{directory / config} exists and is not overwritten. Move it, or set --directory.")
    written = [name for name in (config, *data) if not (directory / name).exists()]
    try:
        for name in written:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            text = resources.files("stack_train.starters").joinpath(name).read_text(encoding="utf-8")
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The files cannot be written: {error}. Choose another --directory.") from error
    print(f"wrote {', '.join(str(directory / name) for name in written)}")
    if start := _STARTS.get(kind):
        print(f"It starts from runs/{start}, of `stack init {start}`; set run.init_from to any other run or hf:DIR.")
    print(f"next: stack train {directory / config}")
