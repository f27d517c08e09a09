"""Preference pairs of images: what a batch holds, with and without encoders, and what is refused."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.captioned import CaptionedData
from stack_train.data.kinds.image_pairs import ImagePairsData
from stack_train.diffusion import autoencoder_kl
from stack_train.diffusion.dit import DitConfig
from stack_train.diffusion.pipeline import save_encoders
from stack_train.run.config import RunConfig

from ...diffusion import shapes
from ...diffusion.test_captioned import AUTOENCODER, FLUX, TINY

DIT = DitConfig(image_size=4, channels=1, classes=3, patch=2, layers=1, heads=1, head_dim=8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_pairs(folder, count=6, *, size=4, **changes):
    """Writes pairs whose chosen image is brighter; the pixels of pair i are 10 i + 100 and 10 i."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        record = {"label": number % 3, "caption": f"a {('red', 'green', 'blue')[number % 3]} ring"}
        for field, grey in (("chosen", 10 * number + 100), ("rejected", 10 * number)):
            Image.new("RGB", (size, size), (grey,) * 3).save(folder / "images" / f"{number}-{field}.png")
            record[field] = f"images/{number}-{field}.png"
        lines.append(json.dumps(record | (changes if number == 1 else {})))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "pairs.jsonl")


def test_a_batch_has_the_preferred_image_first_and_the_label_of_the_pair(tmp_path):
    data = ImagePairsData(source=write_pairs(tmp_path), batch_size=4, validation_fraction=0.2)
    data.check(DIT)
    built = data.build(seed=0, model=DIT)
    batches = [next(built.train_iterator()), *built.validation_batches()]
    assert len(built.training) == 5 and len(built.validation) == 1
    for batch in batches:
        found = {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"}
        assert found == {name: (each.shape, each.dtype) for name, each in data.spec(DIT).items()}
        for row in np.flatnonzero(batch["weights"]):
            chosen, rejected = np.round((batch["images"][row].mean((1, 2, 3)) + 1.0) * 127.5)
            assert chosen == rejected + 100 and batch["labels"][row] == rejected / 10 % 3
            (name,) = built.describe_rows(batch["row_ids"][row : row + 1])
            assert name.endswith(f"pairs.jsonl:{rejected / 10 + 1:.0f}")


def test_latents_and_captions_are_those_of_captioned_images(tmp_path):
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))
    save_encoders(tmp_path / "encoders", shapes.encoders(tmp_path / "encoders", model))
    source = write_pairs(tmp_path, size=20)
    for path in (tmp_path / "images").glob("*.png"):
        path.with_suffix(".txt").write_text(f"a {('red', 'green', 'blue')[int(path.name[0]) % 3]} ring")
    settings = {"pipeline": str(tmp_path / "encoders"), "validation_fraction": 0.0}
    flux = parse(RunConfig, {"output": "none", "model": {**FLUX, **TINY, "text_tokens": 6}}).model
    data = ImagePairsData(source=source, batch_size=6, **settings)
    data.check(flux)
    batch, spec = next((built := data.build(seed=0, model=flux)).train_iterator()), data.spec(flux)
    assert {name: array.shape for name, array in batch.items() if name != "row_ids"} == {
        name: each.shape for name, each in spec.items()
    }
    single = CaptionedData(source=str(tmp_path / "images" / "*.png"), batch_size=12, **settings)
    captioned = single.build(seed=0, model=flux)
    rows = next(captioned.train_iterator())
    names = [name.split("/")[-1].split(".")[0] for name in captioned.describe_rows(rows["row_ids"])]
    for row, pair in enumerate(built.describe_rows(batch["row_ids"])):
        number = int(pair.rsplit(":", 1)[1]) - 1
        for place, field in enumerate(("chosen", "rejected")):
            expected = names.index(f"{number}-{field}")
            np.testing.assert_array_equal(batch["images"][row, place], rows["images"][expected])
            np.testing.assert_array_equal(batch["text"][row], rows["text"][expected])
    built.write(tmp_path)
    assert json.loads((tmp_path / "encoders.json").read_text())["directory"] == settings["pipeline"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": 3}, r"pairs.jsonl:2: 'chosen' is 3; expected the path of an image"),
        ({"label": 3}, r"pairs.jsonl:2: 'label' is 3; expected a number from 0 to 2"),
        ({"label": True}, r"'label' is True"),
        ({"chosen": "images/1-rejected.png"}, r"1 of 6 pairs are equal:\n.*pairs.jsonl:2\n"),
        ({"chosen": "wide.png"}, r"1 of 6 pairs have different sizes:\n.*pairs.jsonl:2: 8x4 and 4x4"),
        ({"rejected": "none.png"}, r"pairs.jsonl:2: 'rejected' is 'none.png', and .*none.png is not a file"),
    ],
)
def test_a_pair_that_expresses_no_preference_is_refused(changes, message, tmp_path):
    Image.new("L", (8, 4)).save(tmp_path / "wide.png")
    with pytest.raises(DataError, match=message):
        ImagePairsData(source=write_pairs(tmp_path, **changes)).build(seed=0, model=DIT)


def test_encoders_belong_to_denoisers_of_latents(tmp_path):
    flux = parse(RunConfig, {"output": "none", "model": {**FLUX, **TINY, "text_tokens": 6}}).model
    cases = [
        (DIT, {"pipeline": "encoders"}, "reads no captions, which data.pipeline encodes"),
        (DIT, {"encoded_at_once": 3}, "data.encoded_at_once would have no effect without data.pipeline"),
        (flux, {}, "data.pipeline, the directory of the encoders, is missing"),
        (parse(RunConfig, {"output": "none", "model": {"name": "llama"}}).model, {}, "not for family 'llama'"),
    ]
    for model, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            ImagePairsData(source="none", **settings).check(model)
