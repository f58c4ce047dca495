"""The tensors of one call: checked, and converted to one dtype and unit length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.kernels import Kernel, Units
from hardneg.losses.kernels.interface import safe_lengths
from hardneg.losses.settings import Settings


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call in one floating dtype of at least 32 bits, of unit length if ``normalize``.

    views: (V, B, d), the anchors' view first · paired: there are two views, each the other's positive · labels: (B,) ·
    negatives: (N, d) or (B, N, d) · exclude: (B, E) · negative_labels: (N,) or (B, N) · negative_mask: (B, N) bool ·
    positive_mask: (B, M) bool · similarity: (B,) inner products of the two views, if they are known already ·
    precision: the half precision of the given embeddings, or None · validity: () of the values on an accelerator, by
    which the loss is multiplied; see `checks.values`
    """

    views: Tensor
    paired: bool
    labels: Tensor | None = None
    negatives: Tensor | None = None
    exclude: Tensor | None = None
    negative_labels: Tensor | None = None
    negative_mask: Tensor | None = None
    positive_mask: Tensor | None = None
    similarity: Tensor | None = None
    precision: torch.dtype | None = None
    validity: Tensor | None = None


def check_call(
    settings: Settings,
    z2: Tensor | None,
    labels: Tensor | None,
    negatives: Tensor | None,
    negative_labels: Tensor | None,
    positive_mask: Tensor | None,
) -> None:
    """Raise where the arguments of a call do not fit the settings."""
    supervision, in_batch = settings.supervision, settings.in_batch
    if isinstance(z2, Tensor) and not z2.is_floating_point():
        raise ValueError(
            f"z2 must hold the embeddings of the other view, got dtype {z2.dtype}: pass labels by keyword, labels="
        )
    if labels is not None and supervision == "none":
        raise ValueError("labels were given, but supervision='none' ignores them: set supervision or leave them out")
    if labels is None and supervision != "none":
        raise ValueError(f"supervision={supervision!r} needs labels: pass labels=, with −1 where unknown")
    if negatives is None and in_batch is None:
        raise ValueError("in_batch=None takes no negatives from the batch: pass negatives=")
    if negative_labels is not None and supervision not in ("negatives", "full"):
        raise ValueError(f"negative_labels were given, but supervision={supervision!r} ignores them")
    if negatives is not None and negative_labels is None and supervision in ("negatives", "full"):
        raise ValueError(f"supervision={supervision!r} with negatives needs negative_labels, with −1 where unknown")
    if z2 is None and supervision not in ("positives", "full"):
        raise ValueError(f"one view needs positives from labels, but supervision={supervision!r}: pass z2 or set it")
    if z2 is None and in_batch == "other":
        raise ValueError("in_batch='other' needs a second view: pass z2, or set in_batch='both'")
    if settings.symmetric and isinstance(z2, Tensor) and z2.dim() == 3:
        raise ValueError(f"symmetric=True needs z2 of shape (B, d), got {tuple(z2.shape)}")
    if positive_mask is not None and (in_batch is not None or supervision in ("positives", "full")):
        raise ValueError(
            "positive_mask is for given positives and given negatives: set in_batch=None and take no positives "
            f"from labels, got in_batch={in_batch!r}, supervision={supervision!r}"
        )


def check_views(z1: Tensor, z2: Tensor | None) -> list[tuple[str, Tensor]]:
    """Raise unless the views are floating-point tensors of shapes that fit; return them with their names."""
    checks.floating("z1", z1)
    if z1.dim() != 2 or 0 in z1.shape:
        raise ValueError(f"z1 must have shape (B, d) with B, d ≥ 1, got {tuple(z1.shape)}")
    batch, dim = z1.shape
    views = [("z1", z1)]
    if z2 is not None:
        checks.floating("z2", z2)
        if z2.dim() not in (2, 3) or (z2.shape[0], z2.shape[-1]) != (batch, dim) or 0 in z2.shape:
            raise ValueError(
                f"z2 must have shape (B, d) or (B, M, d) with (B, d) = {batch, dim}, got {tuple(z2.shape)}"
            )
        views.append(("z2", z2))
    return views


def check_negatives(
    batch: int,
    dim: int,
    negatives: Tensor,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Raise unless negatives, their exclusions, labels and mask fit; return ``exclude`` as (B, E), labels, validity."""
    validity, labels_validity = None, None
    checks.floating("negatives", negatives)
    shape = tuple(negatives.shape)
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == batch)) or shape[-1] != dim:
        raise ValueError(f"negatives must have shape (N, d) or (B, N, d) with (B, d) = {batch, dim}, got {shape}")
    if exclude is not None:
        columns = exclude.shape[1:] if isinstance(exclude, Tensor) and exclude.dim() == 2 else ()
        meaning = "indices into negatives for each row of z1"
        exclude = checks.integers("exclude", exclude, (batch, *columns), meaning).reshape(batch, -1)  # (B, E)
        exclude, validity = checks.in_range("exclude", exclude, shape[-2])
        exclude = exclude if exclude.shape[1] else None
    if negative_labels is not None:
        negative_labels = checks.integers("negative_labels", negative_labels, shape[:-1], "one per negative")
        labels_validity = checks.values(negative_labels >= -1, "negative_labels must be ≥ −1, where −1 means unknown")
    if negative_mask is not None:
        _check_mask("negative_mask", negative_mask, (batch, shape[-2]), "True = may be a negative")
    return exclude, negative_labels, checks.jointly(validity, labels_validity)


def prepare(
    z1: Tensor,
    z2: Tensor | None,
    labels: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
    positive_mask: Tensor | None,
    *,
    normalize: bool,
    kernel: Kernel,
) -> Inputs:
    """Check shapes, dtypes and values; convert the embeddings to one dtype, and to unit length if ``normalize``."""
    views = check_views(z1, z2)
    batch, dim = z1.shape
    validities: list[Tensor | None] = []
    if labels is not None:
        labels = checks.integers("labels", labels, (batch,), "one per row of z1")
        validities.append(checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown"))
    if negatives is None:
        for name, given in (
            ("exclude", exclude),
            ("negative_labels", negative_labels),
            ("negative_mask", negative_mask),
        ):
            if given is not None:
                raise ValueError(f"{name} was given without negatives: pass negatives= or leave it out")
    else:
        exclude, negative_labels, validity = check_negatives(
            batch, dim, negatives, exclude, negative_labels, negative_mask
        )
        validities.append(validity)
    if positive_mask is not None:
        if z2 is None or z2.dim() != 3:
            raise ValueError("positive_mask was given, but z2 is not (B, M, d): pass several positives or leave it out")
        _check_mask("positive_mask", positive_mask, (batch, z2.shape[1]), "True = is a positive")
    given_tensors = {
        "z2": z2, "labels": labels, "negatives": negatives,
        "exclude": exclude, "negative_labels": negative_labels, "negative_mask": negative_mask,
        "positive_mask": positive_mask,
    }  # fmt: skip
    dtype = torch.promote_types(torch.float32, z1.dtype)
    for name, tensor in given_tensors.items():
        if tensor is None:
            continue
        if tensor.device != z1.device:
            raise ValueError(f"{name} is on {tensor.device}, but z1 on {z1.device}: move all inputs to one device")
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)

    similarity, precision = None, half_precision(z1, z1 if z2 is None else z2)
    if negatives is not None and negatives.dtype != precision and not normalize:
        precision = None  # it may not represent the negatives exactly
    if normalize and kernel.units is not None and dtype == torch.float32:
        flat, similarity, validity = _units_by_kernel(kernel.units, views, z1, z2, precision)
        validities.append(validity)
        if negatives is not None:
            rows = negatives.flatten(0, -2)
            rows, _, validity = _units_by_kernel(kernel.units, [("negatives", negatives)], rows, None, precision)
            validities.append(validity)
            negatives = rows.view(negatives.shape)
    else:
        parts = [z1.to(dtype)]
        if z2 is not None:
            parts.append((z2 if z2.dim() == 2 else z2.transpose(0, 1).reshape(-1, dim)).to(dtype))
        flat, validity = _checked_vectors(views, torch.cat(parts), normalize)  # (V·B, d): view after view
        validities.append(validity)
        if negatives is not None:
            negatives, validity = _checked_vectors([("negatives", negatives)], negatives.to(dtype), normalize)
            validities.append(validity)
    return Inputs(
        views=flat.view(-1, batch, dim),
        paired=z2 is not None and z2.dim() == 2,
        labels=labels,
        negatives=negatives,
        exclude=exclude,
        negative_labels=negative_labels,
        negative_mask=negative_mask,
        positive_mask=positive_mask,
        similarity=similarity,
        precision=precision,
        validity=checks.jointly(*validities),
    )


def half_precision(z1: Tensor, z2: Tensor) -> torch.dtype | None:
    """The common half-precision dtype of the views, in which a GPU's matrix products are fast; None for any other."""
    return z1.dtype if z1.dtype == z2.dtype and z1.dtype in (torch.bfloat16, torch.float16) else None


def normalized(vectors: Tensor, smallest: float = 1e-30) -> Tensor:
    """Unit vectors along the last dimension; vectors shorter than ``smallest`` become zero, with zero gradient.

    Dividing by the largest entry first keeps the squares from overflowing or vanishing.
    """
    largest = vectors.detach().abs().amax(dim=-1, keepdim=True)
    zero = largest < smallest
    # The second derivative of a length is NaN at zero, so zero vectors are replaced before it is computed.
    moderate = (vectors / largest.masked_fill(zero, 1)).masked_fill(zero, 1)
    length: Tensor = torch.linalg.vector_norm(moderate, dim=-1, keepdim=True)
    return (moderate / length).masked_fill(zero, 0)


def _check_mask(name: str, mask: object, shape: tuple[int, int], meaning: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a bool tensor ({meaning}), got {got}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(mask.shape)}")


def _smallest_length(named: list[tuple[str, Tensor]]) -> float:
    """The length below which a vector counts as zero, because the gradient of its direction would overflow."""
    smallest = 1e-30
    for _, tensor in named:
        smallest = max(smallest, torch.finfo(tensor.dtype).tiny)
    return smallest


def _checked_vectors(named: list[tuple[str, Tensor]], vectors: Tensor, normalize: bool) -> tuple[Tensor, Tensor | None]:
    """The vectors, of unit length if ``normalize``, and their validity. named: the tensors they come from."""
    smallest = _smallest_length(named)
    eager = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if normalize and not checks.on_accelerator(vectors.device) and vectors.numel() > 0 and eager:
        lengths = safe_lengths(vectors.detach(), smallest)
        if lengths is not None:
            unit: Tensor = _Divide.apply(vectors, lengths)  # type: ignore[no-untyped-call]
            return unit, None
    validity = checks.jointly(*[checks.finite(name, tensor) for name, tensor in named])
    return normalized(vectors, smallest) if normalize else vectors, validity


def _units_by_kernel(
    units: Units, named: list[tuple[str, Tensor]], z1: Tensor, z2: Tensor | None, precision: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Unit vectors by the kernel's own operator, view after view; inner products (B,) of two views; and validity."""
    if z2 is not None and z2.dim() == 3:
        z1, z2 = torch.cat([z1, z2.transpose(0, 1).reshape(-1, z1.shape[1])]), None
    names = " or ".join(name for name, _ in named)
    unit, similarity = units(z1, z2, _smallest_length(named), precision, names)
    # The inner products are NaN where an embedding is not finite.
    validity = 1 + 0 * similarity.detach().sum() if checks.on_accelerator(z1.device) else None
    return unit, None if z2 is None else similarity, validity


class _Divide(torch.autograd.Function):
    """Divides vectors by their nonzero lengths (…, 1)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, vectors: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, lengths)
        return vectors / lengths

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        vectors, lengths = ctx.saved_tensors  # type: ignore[attr-defined]
        if torch.is_grad_enabled():  # for a second derivative: lengths depend on vectors
            lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        unit = vectors / lengths
        along = (unit * grad).sum(dim=-1, keepdim=True)
        return (grad - unit * along) / lengths, None
