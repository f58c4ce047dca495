"""The encoder of two views splits images itself, and can be used as any other encoder."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hardneg.export import export
from hardneg.images.encoders import Tiny, feature_size
from hardneg.images.two_views import TwoHeads, TwoViews, channels_of, detail_split, split_of
from hardneg.images.views import lab_split
from hardneg.randomness import generator


@given(height=st.integers(1, 7), width=st.integers(1, 7))
@settings(max_examples=49, deadline=None)
def test_coarse_and_detail_are_a_loop_over_squares(height: int, width: int) -> None:
    image = torch.rand(1, 1, height, width, generator=generator("cpu", height, width))
    coarse, detail = detail_split(image)
    for row in range(height):
        for column in range(width):
            top, left = row // 2 * 2, column // 2 * 2
            mean = image[0, 0, top : top + 2, left : left + 2].mean()
            assert_close(coarse[0, 0, row, column], 2 * mean - 1)
            assert_close(detail[0, 0, row, column], image[0, 0, row, column] - mean)


def test_the_features_are_those_of_both_views_side_by_side() -> None:
    first, second = Tiny(1, 8, features=5).eval(), Tiny(2, 8, features=7).eval()
    encoder, images = TwoViews(first, second, "lab").eval(), torch.rand(4, 3, 8, 8)
    lightness, color = lab_split(images)
    assert_close(encoder(images), torch.cat([first(lightness), second(color)], dim=1))
    assert feature_size(encoder, (3, 8, 8)) == encoder.features == 12


def test_heads_take_the_part_of_their_view() -> None:
    heads = TwoHeads(torch.nn.Linear(5, 2), torch.nn.Linear(7, 3), (5, 7))
    features = torch.rand(4, 12)
    assert_close(heads(features), torch.cat([heads.first(features[:, :5]), heads.second(features[:, 5:])], dim=1))


@pytest.mark.parametrize(("channels", "split", "each"), [(3, "lab", (1, 2)), (1, "detail", (1, 1))])
def test_the_split_follows_from_the_channels(channels: int, split: str, each: tuple[int, int]) -> None:
    assert split_of(channels) == split
    assert channels_of(split) == each


def test_other_channels_and_other_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="1 or 3 channels"):
        split_of(4)
    with pytest.raises(ValueError, match="did you mean 'lab'"):
        TwoViews(Tiny(), Tiny(), "labs")


@pytest.mark.parametrize("format", ["safetensors", "torchscript", "torch_export"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_encoder_of_two_views_is_exported(format: str, channels: int, tmp_path: Path) -> None:
    split = split_of(channels)
    first, second = (Tiny(count, 8) for count in channels_of(split))
    example: Tensor = torch.rand(1, channels, 8, 8)
    assert export(TwoViews(first, second, split), example, tmp_path / "two", format).exists()
