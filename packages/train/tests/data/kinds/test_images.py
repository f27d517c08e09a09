import numpy as np
import pytest
from PIL import ExifTags, Image

from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.image_files import read_images
from stack_train.data.image_source import ImageFiles
from stack_train.data.kinds.images import ImagesData
from stack_train.diffusion.dit import DitConfig
from stack_train.models.llama import LlamaConfig

MODEL = DitConfig(image_size=4, channels=3, classes=2, layers=1, heads=1, head_dim=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Red images in the folder b and green ones in a, wider than high and otherwise coloured at both ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "images"
    for name, colour in (("b", (255, 0, 0)), ("a", (0, 255, 0))):
        (root / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((8, 16, 3), colour, np.uint8)
            pixels[:, :4] = pixels[:, 12:] = 0, 0, 255
            pixels[0, 8] = number  # no copies
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def data(folder, **fields):
    return ImagesData(source=f"{folder}/**/*", batch_size=8, validation_fraction=0.0, **fields)


def test_images_are_squares_of_the_models_size_labelled_by_folder(folder):
    section = data(folder)
    batches = section.build(seed=0, model=MODEL)
    batch = next(batches.train_iterator())
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"} == {
        name: (struct.shape, struct.dtype) for name, struct in section.spec(MODEL).items()
    }
    for image, label, name in zip(
        batch["images"], batch["labels"], batches.describe_rows(batch["row_ids"]), strict=True
    ):
        assert f"/{'ab'[label]}/" in name
        np.testing.assert_allclose(image[3, 3], [(-1, 1, -1), (1, -1, -1)][label], atol=0.1)


def test_grey_models_get_grey_images_and_the_cache_is_read_again(folder, monkeypatch):
    grey = DitConfig(image_size=4, channels=1, classes=0, layers=1, heads=1, head_dim=4)
    first = next(data(folder).build(seed=0, model=grey).train_iterator())
    assert first["images"].shape == (8, 4, 4, 1) and "labels" not in first
    monkeypatch.setattr("stack_train.data.image_files.turn_upright", None)
    again = next(data(folder).build(seed=0, model=grey).train_iterator())
    np.testing.assert_array_equal(first["images"], again["images"])


def test_files_that_are_no_images_are_named_counted_and_skipped_by_policy(folder):
    (folder / "a" / "notes.txt").write_text("no image")
    whole = (folder / "a" / "0.png").read_bytes()
    (folder / "a" / "torn.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"2 of 10 files(.|\n)*notes.txt: Unidentified(.|\n)*torn.png(.|\n)*data.unreadable"
    ):
        data(folder).build(seed=0, model=MODEL)
    for _ in range(2):  # also of what the cache holds
        with pytest.warns(UserWarning, match=r"2 of 10 files(.|\n)*notes.txt"):
            batches = data(folder, unreadable="skip").build(seed=0, model=MODEL)
    assert len(batches.training) == 8


def test_a_folder_without_images_or_with_too_many_labels_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"2 folders, a, b, and model.classes is 1"):
        data(folder).build(seed=0, model=DitConfig(image_size=4, channels=3, classes=1, layers=1, heads=1, head_dim=4))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    with pytest.warns(UserWarning, match="1 of 1"), pytest.raises(DataError, match="holds no image"):
        data(tmp_path / "texts", unreadable="skip").build(seed=0, model=MODEL)


@pytest.mark.parametrize(
    ("model", "message"),
    [(DitConfig(), "model.channels is 4, not 1 or 3"), (LlamaConfig(), "needs a model of images, not family 'llama'")],
)
def test_models_that_take_no_such_images_are_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        ImagesData(source="*").check(model)


@pytest.mark.parametrize("orientation", [1, 5, 6])
def test_files_are_turned_upright(orientation, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pixels, exif = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    options = {"channels": 3, "unreadable": "error", "source": "photos"}
    found = read_images(ImageFiles([tmp_path / "photo.png"]), size=(6, 6), **options).pixels[0]
    upright = {1: pixels, 5: pixels.transpose(1, 0, 2), 6: np.rot90(pixels, -1)}
    np.testing.assert_array_equal(found, upright[orientation])
