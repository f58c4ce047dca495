"""Features of a frozen encoder, and checks and random choices that the evaluations share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.randomness import generator


@torch.no_grad()
def extract(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the features of all images in evaluation mode; the mode of each module is restored afterwards.

    encoder: maps a batch (B, …) to features (B, d) · images: (N, …); only one batch at a time is copied to the device ·
    batch_size: images per batch · device: of the encoder (default: that of its parameters; without parameters, that of
    the images) · prepare: maps a batch on that device to the encoder's input (default: uint8 is scaled to [0, 1], and
    the batch is cast to the dtype of the parameters) · returns (N, d) float32 on that device

    Examples:
        >>> images = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
        >>> extract(nn.Flatten(), images, batch_size=2).shape
        torch.Size([3, 4])
    """
    if not isinstance(images, Tensor) or images.dim() == 0 or len(images) == 0:
        raise ValueError(f"images must be a tensor (N, …) of at least one image, got {_shape_or_type(images)}")
    if prepare is None and images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floating, got {images.dtype}: convert them, or pass prepare=")
    batch_size = checks.whole("batch_size", batch_size)
    _refuse_batch_statistics(encoder)
    target = _target_device(encoder, device, images)
    prepare = prepare or _scale_for(encoder)
    asynchronous = target.type == "cuda"  # an asynchronous copy to the host could be read too early

    features: Tensor | None = None
    with evaluating(encoder):
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            output = encoder(prepare(batch.to(target, non_blocking=asynchronous)))
            if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(batch):
                raise ValueError(
                    f"encoder must return features of shape ({len(batch)}, d), got {_shape_or_type(output)}: "
                    "pool or flatten them"
                )
            if features is None:
                features = output.new_empty(len(images), output.shape[1], dtype=torch.float32)  # (N, d)
            features[start : start + batch_size] = output
    assert features is not None
    return features


def checked_features(
    train_features: TensorLike, train_labels: TensorLike, test_features: TensorLike
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Check features (N, d), (T, d) and labels (N,); returns them as tensors, and the dtype to compute in.

    The dtype is at least float32. Unlike a loss, an evaluation synchronizes with the device anyway: bad values raise on
    every device.
    """
    train = _finite_features("train_features", train_features)
    test = _finite_features("test_features", test_features)
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"test_features must have d = {train.shape[1]} as train_features, got {test.shape[1]}: "
            "take both from one encoder"
        )
    _check_device("test_features", test, train)
    labels = checked_labels("train_labels", train_labels, train, "train_features")
    dtype = torch.promote_types(torch.promote_types(torch.float32, train.dtype), test.dtype)
    return train, labels, test, dtype


def checked_labels(name: str, given: TensorLike, features: Tensor, features_name: str) -> Tensor:
    """Check labels (N,), one per row of the features (N, d) and on their device; returns them as int64."""
    labels = checks.as_tensor(name, given)
    labels = checks.integers(name, labels, (len(features),), f"one per row of {features_name}")
    _check_device(name, labels, features, features_name)
    return labels


def _finite_features(name: str, given: TensorLike) -> Tensor:
    features = checks.floating(name, checks.as_tensor(name, given))
    if features.dim() != 2 or 0 in features.shape:
        raise ValueError(f"{name} must have shape (N, d) with N, d ≥ 1, got {tuple(features.shape)}")
    if not bool(torch.stack(torch.aminmax(features.detach())).isfinite().all()):
        raise checks.NonFiniteError(
            f"{name} holds NaN or inf: look for a diverged encoder or an overflow in half precision"
        )
    return features


def _check_device(name: str, tensor: Tensor, other: Tensor, other_name: str = "train_features") -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, but {other_name} on {other.device}: move them to one device")


def class_indices(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The classes (C,) in ascending order, and the class index (N,) of each label."""
    classes, targets = torch.unique(labels, return_inverse=True)
    return classes, targets


def share_equal(predicted: Tensor, labels: Tensor) -> float:
    """Share of the predictions that equal their labels, in [0, 1]."""
    return int((predicted == labels).sum()) / len(labels)  # a float32 mean would not be exact


def random_ranks(targets: Tensor, *counters: int) -> Tensor:
    """Rank the samples of each class in random order from 0; the ranks below n are n draws without replacement.

    targets: (N,) class indices · counters: seed and number of the draw · returns (N,) on the device of ``targets``

    Examples:
        >>> random_ranks(torch.tensor([0, 1, 0]), 0).sort().values
        tensor([0, 0, 1])
    """
    targets_cpu = targets.cpu()  # drawn on the host, so that all devices give the same ranks
    order = torch.randperm(len(targets_cpu), generator=generator("cpu", *counters))
    order = order[targets_cpu[order].argsort(stable=True)]  # (N,) sorted by class, shuffled within each
    counts = targets_cpu.bincount()
    first = (counts.cumsum(0) - counts)[targets_cpu[order]]  # (N,)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(targets_cpu)) - first
    return ranks.to(targets.device)


@contextmanager
def evaluating(encoder: nn.Module) -> Iterator[None]:
    """Context with the encoder in evaluation mode; afterwards the mode of each module is restored."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _target_device(encoder: nn.Module, device: torch.device | str | None, images: Tensor) -> torch.device:
    devices = {tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())}
    if device is None:
        return next(iter(encoder.parameters()), next(iter(encoder.buffers()), images)).device
    wanted = torch.device(device)
    if devices and not any(own.type == wanted.type and wanted.index in (None, own.index) for own in devices):
        raise ValueError(
            f"device={device!s}, but the encoder is on {', '.join(map(str, devices))}: "
            f"move it with .to({device!s}) first"
        )
    return wanted


def _shape_or_type(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _scale_for(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    floating = (parameter.dtype for parameter in encoder.parameters() if parameter.is_floating_point())
    dtype = next(floating, torch.float32)
    return lambda batch: batch.to(dtype).div_(255) if batch.dtype == torch.uint8 else batch.to(dtype)


def _refuse_batch_statistics(encoder: nn.Module) -> None:
    """Raise on batch-norm without running statistics: its features would depend on the other samples of the batch."""
    for name, module in encoder.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"encoder{'.' * bool(name)}{name} has no running statistics, so its features depend on the batch: "
                "build it with track_running_stats=True"
            )
