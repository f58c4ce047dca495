"""ResNet-18, 34 and 50 that return features, with torchvision's names for every weight.

Written here because torchvision is a large dependency that must not be required: this is one file of plain layers.
Weights can be loaded into torchvision's models, and torchvision's weights here.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from hardneg import checks

_LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.relu(x + shortcut)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 (with the stride, as in torchvision) and a 1×1 convolution, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + shortcut)  # type: ignore[no-any-return]


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """A residual network up to its pooled features, (B, C, H, W) → (B, features).

    Args:
        depth: 18, 34 or 50
        stem: ``"small"`` (3×3, no pooling: images of about 32 pixels) or ``"imagenet"`` (7×7, stride 2, pooling)
        channels: of the images
        width: channels of the first stage; 32 is a network of half width, with about a quarter of the weights

    Examples:
        >>> import torch
        >>> ResNet(18)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 512])
        >>> ResNet(18, width=32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 256])
    """

    def __init__(self, depth: int = 18, stem: str = "small", channels: int = 3, width: int = 64) -> None:
        super().__init__()
        width = checks.whole("width", width)
        if depth not in _LAYERS:
            raise ValueError(f"depth must be one of {sorted(_LAYERS)}, got {depth!r}")
        if stem not in ("small", "imagenet"):
            raise ValueError(f"stem must be 'small' or 'imagenet', got {stem!r}")
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck if depth == 50 else BasicBlock
        small = stem == "small"
        self.conv1 = nn.Conv2d(channels, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        inputs, stages = width, []
        for stage, count in enumerate(_LAYERS[depth]):
            layers = []
            for position in range(count):
                layers.append(block(inputs, width << stage, 2 if stage > 0 and position == 0 else 1))
                inputs = (width << stage) * block.expansion
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.features = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (B, features, h, w)
        return x.mean(dim=(2, 3))

    def load_torchvision(self, state: Mapping[str, Tensor]) -> None:
        """Load the weights of a torchvision ResNet of the same depth and stem, without its classifier ``fc``."""
        self.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("fc.")})


def resnet18(stem: str = "small", channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-18, 512 features at width 64."""
    return ResNet(18, stem, channels, width)


def resnet34(stem: str = "small", channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-34, 512 features at width 64."""
    return ResNet(34, stem, channels, width)


def resnet50(stem: str = "small", channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-50, 2,048 features at width 64."""
    return ResNet(50, stem, channels, width)
