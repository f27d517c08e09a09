"""Language models published as a part of a larger model, such as Gemma 3 with an encoder of images.

Their `config.json` has the language model's keys under `text_config`, and their tensors are named after the part they
are of: "language_model.model.layers.0..." as published, "model.language_model.layers.0..." as transformers saves them
since 4.52.
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
_LEFT_OUT = ("vision_tower", "multi_modal_projector")
# Keys of the whole model that the text's own config may leave out.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
_TIED = "tie_word_embeddings"  # transformers 5 reads the whole model's, if it has one


@dataclass(frozen=True)
class LanguagePart:
    """The language model of a multimodal checkpoint, in the layout of a text-only checkpoint.

    Attributes:
      left_out: the other parts with their numbers of tensors, for messages.
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
