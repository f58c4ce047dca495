"""Features of a frozen encoder, and what every evaluation of them shares: checks, precision, random choices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hardneg import checks
from hardneg.randomness import generator


@torch.no_grad()
def extract(
    encoder: nn.Module,
    images: Tensor,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Features of all images, in evaluation mode: batch-norm is frozen, and each module's mode is restored afterwards.

    encoder: maps a batch (B, …) to features (B, d) · images: (N, …), left where they are; only a batch at a time goes
    to the encoder · batch_size: images per batch · device: where the encoder is (default: where its parameters are;
    without any, where the images are) · prepare: maps a batch, on that device, to the encoder's input (default: uint8
    is scaled to [0, 1], and everything is cast to the dtype of the parameters) · returns (N, d) float32 on that device

    Examples:
        >>> images = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
        >>> extract(nn.Flatten(), images, batch_size=2).shape
        torch.Size([3, 4])
    """
    if not isinstance(images, Tensor) or images.dim() == 0 or len(images) == 0:
        raise ValueError(f"images must be a tensor (N, …) of at least one image, got {_described(images)}")
    if prepare is None and images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floating, got {images.dtype}: convert them, or pass prepare=")
    checks.whole("batch_size", batch_size)
    _refuse_batch_statistics(encoder)
    place = _place(encoder, device, images)
    ready = prepare or _scaled_to(encoder)
    copy_ahead = place.type == "cuda"  # towards the host, an asynchronous copy could be read too early

    features: Tensor | None = None
    with evaluating(encoder):
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            output = encoder(ready(batch.to(place, non_blocking=copy_ahead)))
            if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(batch):
                raise ValueError(
                    f"encoder must return features of shape ({len(batch)}, d), got {_described(output)}: "
                    "pool or flatten them"
                )
            if features is None:
                features = output.new_empty(len(images), output.shape[1], dtype=torch.float32)  # (N, d)
            features[start : start + batch_size] = output
    assert features is not None
    return features


def check_sets(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor | None = None
) -> torch.dtype:
    """Check features (N, d), (T, d) and labels (N,), (T,); returns the dtype to compute in, at least float32.

    Unlike a loss, an evaluation waits for the device anyway: bad values raise here, on every device.
    """
    dtype = torch.float32
    for name, features in (("train_features", train_features), ("test_features", test_features)):
        checks.floating(name, features)
        if features.dim() != 2 or 0 in features.shape:
            raise ValueError(f"{name} must have shape (N, d) with N, d ≥ 1, got {tuple(features.shape)}")
        if not bool(torch.stack(torch.aminmax(features.detach())).isfinite().all()):
            raise ValueError(f"{name} holds NaN or inf: look for a diverged encoder or an overflow in half precision")
        dtype = torch.promote_types(dtype, features.dtype)
    if train_features.shape[1] != test_features.shape[1]:
        raise ValueError(
            f"test_features must have d = {train_features.shape[1]} as train_features, got {test_features.shape[1]}: "
            "take both from one encoder"
        )
    checks.integers("train_labels", train_labels, (len(train_features),), "one per row of train_features")
    if test_labels is not None:
        checks.integers("test_labels", test_labels, (len(test_features),), "one per row of test_features")
    for name, tensor in (
        ("train_labels", train_labels),
        ("test_features", test_features),
        ("test_labels", test_labels),
    ):
        if tensor is not None and tensor.device != train_features.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but train_features on {train_features.device}: move them to one device"
            )
    return dtype


def class_indices(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The classes (C,), ascending, and the index of each label's class, (N,)."""
    classes, targets = torch.unique(labels, return_inverse=True)
    return classes, targets


def share_equal(predicted: Tensor, labels: Tensor) -> float:
    """Share of the predictions that equal their labels, in [0, 1]."""
    return int((predicted == labels).sum()) / len(labels)  # a float32 mean would not be exact


def random_ranks(targets: Tensor, *counters: int) -> Tensor:
    """A random rank from 0 of each sample within its class; the ranks below n are n samples drawn without replacement.

    targets: (N,) class indices · counters: seed and place of the draw · returns (N,) on the device of ``targets``

    Examples:
        >>> random_ranks(torch.tensor([0, 1, 0]), 0).sort().values
        tensor([0, 0, 1])
    """
    here = targets.cpu()  # drawn on the host, so that every device sees one choice
    order = torch.randperm(len(here), generator=generator("cpu", *counters))
    order = order[here[order].argsort(stable=True)]  # (N,) class after class, shuffled within each
    counts = here.bincount()
    first = (counts.cumsum(0) - counts)[here[order]]  # (N,)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(here)) - first
    return ranks.to(targets.device)


@contextmanager
def evaluating(encoder: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module has its own mode again, so that what was frozen stays frozen."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _place(encoder: nn.Module, device: torch.device | str | None, images: Tensor) -> torch.device:
    homes = {tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())}
    if device is None:
        return next(iter(encoder.parameters()), next(iter(encoder.buffers()), images)).device
    wanted = torch.device(device)
    if homes and not any(home.type == wanted.type and wanted.index in (None, home.index) for home in homes):
        raise ValueError(
            f"device={device!s}, but the encoder is on {', '.join(map(str, homes))}: move it with .to({device!s}) first"
        )
    return wanted


def _described(thing: object) -> str:
    return str(tuple(thing.shape)) if isinstance(thing, Tensor) else type(thing).__name__


def _scaled_to(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    floating = (parameter.dtype for parameter in encoder.parameters() if parameter.is_floating_point())
    dtype = next(floating, torch.float32)
    return lambda batch: batch.to(dtype).div_(255) if batch.dtype == torch.uint8 else batch.to(dtype)


def _refuse_batch_statistics(encoder: nn.Module) -> None:
    """Raise on batch-norm that no mode can freeze: its features would depend on the rest of the batch."""
    for name, module in encoder.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"encoder{'.' * bool(name)}{name} keeps no running statistics, so it cannot be frozen: "
                "build it with track_running_stats=True"
            )
