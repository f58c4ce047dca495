import pytest
import torch
from torch import nn

from hardneg.images import encoders


@pytest.mark.parametrize(
    ("depth", "weights", "features"),
    # torchvision's published totals (11,689,512, 21,797,672 and 25,557,032) less the classifier's
    [(18, 11_689_512 - 513_000, 512), (34, 21_797_672 - 513_000, 512), (50, 25_557_032 - 2_049_000, 2048)],
)
def test_resnets_have_torchvisions_number_of_weights(depth: int, weights: int, features: int) -> None:
    network = encoders.ResNet(depth, stem="imagenet")
    assert sum(weight.numel() for weight in network.parameters()) == weights
    assert network.features == features


@pytest.mark.parametrize("depth", [18, 50])
def test_the_width_scales_the_channels_of_every_convolution(depth: int) -> None:
    whole, half = encoders.ResNet(depth), encoders.ResNet(depth, width=32)
    shapes = [(a.shape, b.shape) for a, b in zip(whole.parameters(), half.parameters(), strict=True)]
    assert len(shapes) > 50
    for wide, narrow in shapes[1:]:  # the first convolution takes the channels of the images
        assert tuple(narrow) == tuple(size // 2 if side < 2 else size for side, size in enumerate(wide))
    assert half(torch.zeros(2, 3, 32, 32)).shape == (2, whole.features // 2)
    with pytest.raises(ValueError, match="width must be a whole number ≥ 1, got 0"):
        encoders.build("resnet18", width=0)


def test_resnet_names_are_torchvisions() -> None:
    names = set(encoders.resnet50("imagenet").state_dict())
    for name in (
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer4.2.bn3.bias",
    ):
        assert name in names
    assert "layer1.1.downsample.0.weight" not in names
    assert "layer1.0.downsample.0.weight" not in encoders.resnet18("imagenet").state_dict()


@pytest.mark.parametrize(("stem", "side"), [("small", 32), ("imagenet", 64)])
@pytest.mark.parametrize("make", [encoders.resnet18, encoders.resnet50])
def test_resnets_reduce_images_by_their_stride(make: object, stem: str, side: int) -> None:
    network = make(stem).eval()  # type: ignore[operator]
    shapes = []
    network.layer4.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[2:])))
    assert network(torch.zeros(2, 3, side, side)).shape == (2, network.features)
    assert shapes == [(side // 8, side // 8) if stem == "small" else (side // 32, side // 32)]


def test_torchvision_weights_load_without_their_classifier() -> None:
    source = encoders.resnet18("imagenet")
    state = dict(source.state_dict()) | {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    target = encoders.resnet18("imagenet")
    target.load_torchvision(state)
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(source.eval()(images), target.eval()(images))
    with pytest.raises(RuntimeError, match="size mismatch"):
        encoders.resnet18("small").load_torchvision(state)


def test_encoders_are_found_by_name_or_by_import() -> None:
    assert isinstance(encoders.build("torch.nn:Linear", in_features=3, out_features=2), nn.Linear)
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        encoders.build("resnet-18")
    with pytest.raises(ValueError, match="could not be imported"):
        encoders.build("torch.nn:NoSuchThing")
    with pytest.raises(ValueError, match=r"must return a torch\.nn\.Module, got ndarray"):
        encoders.build("numpy:eye", N=2)
    with pytest.raises(ValueError, match="depth must be one of"):
        encoders.ResNet(19)


def test_feature_size_is_found_by_a_forward_pass() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 7), nn.BatchNorm1d(7))
    assert encoders.feature_size(network, (3, 4, 4)) == 7
    assert network.training
    with pytest.raises(ValueError, match=r"must return \(B, features\)"):
        encoders.feature_size(nn.Identity(), (3, 4, 4))
