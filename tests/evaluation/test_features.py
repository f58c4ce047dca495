"""Features are computed batch by batch by a frozen encoder, which is left unchanged."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from hardneg.evaluation import extract
from hardneg.evaluation.features import random_ranks
from hardneg.matmul import exact_products


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)
    )
    encoder(torch.rand(16, 3, 8, 8))  # running statistics that differ from those of any batch below
    return encoder


def random_images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)


class Recorder(nn.Module):
    """Flattens its input, and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen.append(batch)
        return batch.flatten(1)


@pytest.mark.parametrize("batch_size", [1, 5, 7, 100])
def test_features_do_not_depend_on_the_batches(batch_size: int) -> None:
    encoder, images = convolutional(), random_images(13)
    expected = convolutional().eval()(images / 255).detach()
    features = extract(encoder, images, batch_size=batch_size)
    assert_close(features, expected)
    assert not features.requires_grad


def test_batch_norm_is_frozen() -> None:
    encoder = convolutional()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    extract(encoder, random_images(5))
    assert_close(encoder.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_mode_of_each_module_is_restored(fails: bool) -> None:
    encoder = convolutional().train()
    encoder[1].eval()  # a user may have frozen a part of the encoder already
    before = [module.training for module in encoder.modules()]

    def prepare(batch: Tensor) -> Tensor:
        assert not any(module.training for module in encoder.modules())
        if fails:
            raise RuntimeError("no such image")
        return batch / 255

    if fails:
        with pytest.raises(RuntimeError, match="no such image"):
            extract(encoder, random_images(3), prepare=prepare)
    else:
        extract(encoder, random_images(3), prepare=prepare)
    assert [module.training for module in encoder.modules()] == before


def test_uint8_is_scaled_and_floats_are_not() -> None:
    images = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    assert_close(extract(nn.Flatten(), images), torch.tensor([[0, 0.2, 1]]))
    assert_close(extract(nn.Flatten(), images.float()), images.float())


def test_prepare_replaces_the_scaling() -> None:
    images = random_images(3)
    assert_close(extract(nn.Flatten(), images, prepare=lambda batch: batch.float() - 1), images.flatten(1).float() - 1)


def test_batches_are_encoded_one_at_a_time_and_images_stay_unchanged() -> None:
    encoder, images = Recorder(), random_images(7)
    original = images.clone()
    extract(encoder, images, batch_size=3)
    assert [len(batch) for batch in encoder.seen] == [3, 3, 1]
    assert_close(images, original, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_are_float32_for_every_dtype_of_the_encoder(dtype: torch.dtype) -> None:
    encoder = nn.Linear(4, 2).to(dtype)
    features = extract(encoder, torch.rand(3, 4))
    assert features.dtype == torch.float32
    assert features.shape == (3, 2)


@pytest.mark.parametrize(
    ("encoder", "images", "options", "message"),
    [
        (nn.Flatten(), torch.zeros(0, 3), {}, "images must be .* at least one image, got \\(0, 3\\)"),
        (nn.Flatten(), [1, 2], {}, "images must be a tensor .* got list"),
        (nn.Flatten(), torch.zeros(2, 3, dtype=torch.int64), {}, "images must be uint8 or floating.* prepare="),
        (nn.Flatten(), torch.zeros(2, 3), {"batch_size": 0}, "batch_size must be a whole number ≥ 1, got 0"),
        (
            nn.Identity(),
            torch.zeros(2, 3, 4),
            {},
            "encoder must return .* \\(2, d\\), got \\(2, 3, 4\\): pool or flatten",
        ),
        (nn.LSTM(3, 2), torch.zeros(2, 3), {}, "encoder must return .* got tuple"),
        (nn.Flatten(0, 1), torch.zeros(2, 3, 4), {}, "encoder must return"),
        (nn.Linear(3, 2), torch.zeros(2, 3), {"device": "cuda"}, "the encoder is on cpu: move it with .to\\(cuda\\)"),
        (
            nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
            torch.zeros(2, 3),
            {},
            "encoder.0 has no running statistics.*track_running_stats=True",
        ),
    ],
)
def test_errors_name_the_argument_and_the_fix(
    encoder: nn.Module, images: Tensor, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        extract(encoder, images, **options)  # type: ignore[arg-type]


def test_random_ranks_choose_every_sample_of_a_class_equally_often() -> None:
    targets = torch.tensor([0, 1, 0, 2, 0, 1, 0])
    drawn = torch.stack([random_ranks(targets, 0, draw) < 1 for draw in range(3000)])  # (D, N)
    for target in range(3):
        assert bool((drawn[:, targets == target].sum(dim=1) == 1).all())
    share = drawn.double().mean(dim=0)
    counts = targets.bincount()[targets]
    assert_close(share, 1 / counts.double(), rtol=0, atol=0.04)  # 0.04 is four standard deviations


def test_products_are_exact_under_autocast_and_the_setting_is_restored() -> None:
    one, other = torch.randn(64, 64), torch.randn(64, 64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with exact_products(one.device):
                product = one @ other
            assert (one @ other).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(product.double(), one.double() @ other.double(), rtol=1e-5, atol=1e-5)
