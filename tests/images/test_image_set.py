"""Sets of images: what they promise, whether they are in memory or decoded on demand."""

import io
import pickle
import sys
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader

pytest.importorskip("PIL", reason='decoding images needs pip install "hardneg[train]"')
from PIL import Image

from hardneg.images.folders import FolderImages
from hardneg.images.image_set import Broken, ImageSet, StreamedImages, decode, decode_all, fit, progress, survey


class Files:
    """Encoded images in memory."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def open(self, index: int) -> BinaryIO:
        return io.BytesIO(self.files[index])

    def place(self, index: int) -> str:
        return f"file {index}"


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth color noise: like a photo, it survives JPEG and resizing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def color_images(count: int) -> list[bytes]:
    """PNG files of 8x8 whose red is their number."""
    return [encoded(Image.new("RGB", (8, 8), (number % 256, 0, 0))) for number in range(count)]


def streamed(files: list[bytes], size: int | None = None) -> StreamedImages:
    broken = Broken(len(files), "test")
    return StreamedImages(Files(files), survey(Files(files), size, broken), size, broken=broken)


# --- in memory ---


def test_subset_keeps_images_labels_and_their_order() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 2, 2).contiguous()
    part = ImageSet(images, torch.tensor([0, 1, -1, 1, 0]), ("a", "b"), "five").subset(torch.tensor([3, 0]))
    assert part.images[:, 0, 0, 0].tolist() == [3, 0]
    assert part.labels is not None
    assert part.labels.tolist() == [1, 0]
    assert (part.classes, part.name, len(part), part.shape) == (("a", "b"), "five", 2, (1, 2, 2))


def test_to_moves_images_and_labels() -> None:
    moved = ImageSet(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0]), ("a",)).to("meta")
    assert moved.labels is not None
    assert (moved.images.device.type, moved.labels.device.type) == ("meta", "meta")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), None, r"images must be contiguous uint8 of shape \(N, C, H, W\), got torch.float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), None, r"got torch.uint8 of shape \(2, 4, 4\)"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8).permute(0, 3, 1, 2), None, r"use .contiguous\(\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0]), r"labels must have shape \(2,\)"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.tensor([0, 2]),
            r"one of the 2 classes, got values from 0 to 2",
        ),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, -2]), r"got values from -2 to 0"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]).int(), r"must be int64, got torch.int32"),
    ],
)
def test_a_malformed_set_is_refused(images: torch.Tensor, labels: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageSet(images, labels, ("a", "b"))


def test_subset_refuses_rows_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="indices must hold indices from 0 to 1"):
        ImageSet(torch.zeros(2, 1, 2, 2, dtype=torch.uint8)).subset([2])


# --- decoding ---


@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 60), (64, 64), (20, 33), (32, 200)])
def test_fit_agrees_with_pillow_resize_and_crop(height: int, width: int) -> None:
    image = photo(height, width)
    # What is more than half the shorter side beyond the centre square is cut off first.
    wide, tall = min(width, 2 * min(height, width)), min(height, 2 * min(height, width))
    left, top = (width - wide) // 2, (height - tall) // 2
    image = image.crop((left, top, left + wide, top + tall))
    sides = [round(side * 32 / min(wide, tall)) for side in (wide, tall)]
    expected = image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR)
    left, top = (sides[0] - 32) // 2, (sides[1] - 32) // 2
    expected = expected.crop((left, top, left + 32, top + 32))

    pixels = torch.from_numpy(np.array(photo(height, width))).permute(2, 0, 1)[None]
    difference = fit(pixels, 32)[0].permute(1, 2, 0).int() - torch.from_numpy(np.array(expected)).int()
    assert difference.abs().max() <= 1


def test_fit_of_an_extreme_strip_stays_small() -> None:
    assert fit(torch.zeros(1, 3, 1, 100_000, dtype=torch.uint8), 64).shape == (1, 3, 64, 64)


def test_lossless_images_decode_to_their_pixels() -> None:
    image = photo(12, 9)
    pixels = decode(io.BytesIO(encoded(image)), (3, 12, 9), None)
    assert_close(pixels.permute(1, 2, 0), torch.from_numpy(np.array(image)))


def test_reduced_decoding_of_jpeg_agrees_with_decoding_it_whole() -> None:
    file = encoded(photo(512, 640), "JPEG", quality=95)
    whole = torch.from_numpy(np.array(Image.open(io.BytesIO(file)))).permute(2, 0, 1)
    reduced = decode(io.BytesIO(file), (3, 32, 32), 32)
    assert (reduced.int() - fit(whole[None], 32)[0].int()).abs().max() <= 4


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_exif_orientation_is_applied(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 10, 10))  # blue left, red right: upright, blue is on top
    files = Files([encoded(image, kind, exif=exif, quality=95)])
    assert survey(files, None, Broken(1, "test")) == (3, 20, 10)
    upright = decode(files.open(0), (3, 20, 10), None)
    assert upright[2, 2, 5] > 200
    assert upright[0, 17, 5] > 200


def test_sixteen_bits_are_scaled_to_eight() -> None:
    ramp = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    pixels = decode(io.BytesIO(encoded(Image.fromarray(ramp))), (1, 8, 8), None)
    assert_close(pixels[0], torch.from_numpy((ramp // 256).astype(np.uint8)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb_or_gray(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    file = encoded(Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode), kind)
    for channels in (1, 3):
        assert decode(io.BytesIO(file), (channels, 4, 4), None).float().mean() == 255


def test_a_palette_with_transparency_decodes_without_a_warning() -> None:
    image = Image.new("RGB", (4, 4), (9, 9, 9)).convert("P")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(io.BytesIO(encoded(image, transparency=b"\x00\x80")), (3, 4, 4), None)


# --- the survey of headers ---


def test_images_are_gray_only_if_all_are() -> None:
    gray, color = encoded(Image.new("L", (8, 8))), encoded(Image.new("RGB", (8, 8)))
    assert survey(Files([gray] * 3), None, Broken(3, "test")) == (1, 8, 8)
    assert survey(Files([gray, gray, color]), None, Broken(3, "test")) == (3, 8, 8)
    assert survey(Files([gray, gray, color]), 5, Broken(3, "test")) == (3, 5, 5)


def test_with_a_size_the_survey_stops_at_the_first_color_image() -> None:
    opened = []

    class Watched(Files):
        def open(self, index: int) -> BinaryIO:
            opened.append(index)
            return super().open(index)

    survey(Watched(color_images(50)), 8, Broken(50, "test"))
    assert opened == [0]


def test_images_of_different_sizes_need_a_size() -> None:
    files = Files([encoded(photo(8, 8)), encoded(photo(8, 9))])
    with pytest.raises(ValueError, match=r"differ in size.*file 0 is 8x8, file 1 is 8x9 \(HxW\); pass size=224"):
        survey(files, None, Broken(2, "test"))
    images, *_ = decode_all(files, survey(files, 6, Broken(2, "test")), 6, Broken(2, "test"))
    assert images.shape == (2, 3, 6, 6)


# --- broken images ---


def test_readable_images_keep_their_index_among_broken_ones() -> None:
    files = color_images(200)
    files[5], files[120] = files[5][:-30], b"not an image"
    broken = Broken(200, "test")
    images, sound, _ = decode_all(Files(files), (3, 8, 8), None, broken)
    assert sound.tolist() == [number for number in range(200) if number not in (5, 120)]
    assert_close(images[:, 0, 0, 0].long(), sound)
    assert broken.flags.nonzero().flatten().tolist() == [5, 120]
    assert str(broken).startswith("skipped 2 of 200 images of test that cannot be read: file 5 (")


def test_more_than_one_percent_of_broken_images_is_an_error() -> None:
    files = color_images(200)
    for number in (3, 4, 190):
        files[number] = b""
    with pytest.raises(ValueError, match=r"stopped: 3 of 200 images of test cannot.*More than 1 % are broken"):
        decode_all(Files(files), (3, 8, 8), None, Broken(200, "test"))


def test_a_broken_image_in_a_stream_is_replaced_by_the_next_one_with_its_index() -> None:
    files = color_images(200)
    files[7], files[199] = files[7][:-30], files[199][:-30]
    images = streamed(files)
    with pytest.warns(UserWarning, match=r"skipped 1 of 200 images of test that cannot be read: file 7 \("):
        index, image = images[7]
    assert (index, int(image[0, 0, 0])) == (8, 8)
    with pytest.warns(UserWarning, match="skipped 2 of 200"):
        index, image = images[199]
    assert (index, int(image[0, 0, 0])) == (0, 0)


def test_more_than_one_percent_of_broken_images_in_a_stream_is_an_error() -> None:
    files = color_images(200)
    for number in range(3):
        files[number + 50] = files[number + 50][:-30]
    images = streamed(files)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="More than 1 % are broken"):
        images[50]


def test_a_set_without_readable_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        survey(Files([b"no", b"no"]), None, Broken(2, "test"))


# --- streams ---


def test_a_stream_equals_the_set_in_memory() -> None:
    files = [encoded(photo(20 + seed, 30, seed), "JPEG") for seed in range(10)]
    in_memory, *_ = decode_all(Files(files), (3, 16, 16), 16, Broken(10, "test"))
    images = streamed(files, size=16)
    for index in range(10):
        assert images[index][0] == index
        assert_close(images[index][1], in_memory[index])
    assert images.shape == (3, 16, 16)
    assert images[-1][0] == 9
    with pytest.raises(IndexError):
        images[10]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_count_broken_images_together(context: str, tmp_path: Path) -> None:
    for number, file in enumerate(color_images(200)):
        (tmp_path / f"{number:03}.png").write_bytes(file[:-30] if number in (10, 150) else file)
    # Files of the library, because a spawned process cannot import this test.
    files = FolderImages(tmp_path, sorted(path.name for path in tmp_path.iterdir()))
    images = StreamedImages(files, (3, 8, 8))
    loader = DataLoader(images, batch_size=50, num_workers=2, multiprocessing_context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices = torch.cat([rows for rows, _ in loader])
    assert indices.tolist() == [{10: 11, 150: 151}.get(number, number) for number in range(200)]
    assert len(images.broken) == 2


def test_a_stream_can_be_pickled() -> None:
    images = pickle.loads(pickle.dumps(streamed(color_images(3))))
    assert int(images[2][1][0, 0, 0]) == 2


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_progress_yields_every_step_and_shows_on_a_terminal_only(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rich:
        pytest.importorskip("rich", reason="the bar is rich's")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    for shown, stderr in ((True, Terminal()), (False, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert list(progress(range(0, 10, 3), "decoding")) == [0, 3, 6, 9]
        assert ("decoding" in stderr.getvalue()) == shown
