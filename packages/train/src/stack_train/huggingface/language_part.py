"""Language models inside multimodal checkpoints, such as Gemma 3 with its image encoder.

In `config.json`, the language model's keys are under `text_config`. Names of tensors start with a prefix for their
part: "language_model.model.layers.0..." in published checkpoints, "model.language_model.layers.0..." in checkpoints
saved by transformers 4.52 and later.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ConversionError
from stack_train.safetensors_files import StoredTensor

__all__ = ["LanguagePart", "language_part"]

_TEXT_CONFIG = "text_config"
_RENAMED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_LEFT_OUT = ("vision_tower", "vision_model", "multi_modal_projector", "visual")
_LEFT_OUT += ("audio_tower", "embed_vision", "embed_audio")
# Keys that may be set for the multimodal model only, outside of `text_config`.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
_TIED = "tie_word_embeddings"  # as in transformers 5, the multimodal model's value overrides the text config's


@dataclass(frozen=True)
class LanguagePart:
    """The language model of a multimodal checkpoint, in the layout of a text-only checkpoint.

    Attributes:
      config: `config.json` of the language model.
      tensors: its tensors by name.
      left_out: descriptions of the omitted parts, for messages: "vision_tower (437 tensors)".
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    left_out: tuple[str, ...]


def language_part(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, architecture: str, model_type: str
) -> LanguagePart:
    """Extracts the language model from a multimodal checkpoint.

    Args:
      architecture, model_type: `architectures` and `model_type` in the config of the text-only model.

    Raises:
      ConversionError: `text_config` is missing, or has a different `model_type`.
    """
    text = config.get(_TEXT_CONFIG)
    if not isinstance(text, Mapping) or text.get("model_type", model_type) != model_type:
        given = text.get("model_type") if isinstance(text, Mapping) else text
        raise ConversionError(
            f"config.json has the {_TEXT_CONFIG} {given!r}; one of model_type {model_type!r} was expected, the "
            f"language model of a {(config.get('architectures') or ['larger model'])[0]}."
        )
    shared = {name: config[name] for name in _SHARED if name in config}
    tied = {_TIED: config[_TIED]} if _TIED in config else {}
    # Later entries take precedence.
    part = {**shared, **text, **tied, "architectures": [architecture], "model_type": model_type}
    found, left_out = dict[str, StoredTensor](), Counter[str]()
    for name, tensor in tensors.items():
        if (owner := name.removeprefix("model.").partition(".")[0]) in _LEFT_OUT:
            left_out[owner] += 1
        else:
            found[_renamed(name)] = tensor
    return LanguagePart(part, found, tuple(f"{owner} ({count} tensors)" for owner, count in left_out.items()))


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
