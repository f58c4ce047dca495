"""The tensors of one call: checked, and converted to one dtype and unit length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.execution import is_eager
from hardneg.losses.guide_inputs import guide_views, unit_rows
from hardneg.losses.kernels import Kernel, Units
from hardneg.losses.kernels.interface import safe_lengths
from hardneg.losses.sources import GIVEN, PER_SOURCE, argument


@dataclass(frozen=True)
class Given:
    """The given candidates of one source.

    rows: (N, d) shared or (B, N, d) per anchor · exclude: (B, E) indices of rows · labels, ids: (N,) or (B, N), −1 =
    unknown · allowed: (B, N) bool · guide: (N, e) or (B, N, e) vectors of a guide model
    """

    name: str
    rows: Tensor
    exclude: Tensor | None = None
    labels: Tensor | None = None
    allowed: Tensor | None = None
    ids: Tensor | None = None
    guide: Tensor | None = None

    @property
    def shared(self) -> bool:
        """True if all anchors have the same rows."""
        return self.rows.dim() == 2


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call in one floating dtype of at least 32 bits, of unit length if ``normalize``.

    views: (V, B, d), the anchors' view first · paired: there are two views, each the other's positive · labels: (B,) ·
    given: the sources of given candidates · positive_mask: (B, M) bool · ids: (B, V) of the views, −1 = unknown ·
    not_negatives: (P, 2) pairs of ids · guide: (V, B, e) unit vectors of a guide model · similarity: (B,) inner
    products of the two views, if they are known already · precision: the half precision of the given embeddings, or
    None · validity: () of the values on an accelerator, by which the loss is multiplied; see `checks.values`
    """

    views: Tensor
    paired: bool
    labels: Tensor | None = None
    given: tuple[Given, ...] = ()
    positive_mask: Tensor | None = None
    ids: Tensor | None = None
    not_negatives: Tensor | None = None
    guide: Tensor | None = None
    similarity: Tensor | None = None
    precision: torch.dtype | None = None
    validity: Tensor | None = None


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
    source: str = GIVEN,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Raise unless negatives, their exclusions, labels and mask fit; return ``exclude`` as (B, E), labels, validity."""
    validity, labels_validity = None, None
    name = argument("negatives", source)
    checks.floating(name, negatives)
    shape = tuple(negatives.shape)
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == batch)) or shape[-1] != dim:
        raise ValueError(f"{name} must have shape (N, d) or (B, N, d) with (B, d) = {batch, dim}, got {shape}")
    if exclude is not None:
        columns = exclude.shape[1:] if isinstance(exclude, Tensor) and exclude.dim() == 2 else ()
        meaning, name = "indices into negatives for each row of z1", argument("exclude", source)
        exclude = checks.integers(name, exclude, (batch, *columns), meaning).reshape(batch, -1)  # (B, E)
        exclude, validity = checks.in_range(name, exclude, shape[-2])
        exclude = exclude if exclude.shape[1] else None
    if negative_labels is not None:
        name = argument("negative_labels", source)
        negative_labels = checks.integers(name, negative_labels, shape[:-1], "one per negative")
        labels_validity = checks.values(negative_labels >= -1, f"{name} must be ≥ −1, where −1 means unknown")
    if negative_mask is not None:
        meaning = "True = may be a negative"
        _check_mask(argument("negative_mask", source), negative_mask, (batch, shape[-2]), meaning)
    return exclude, negative_labels, checks.jointly(validity, labels_validity)


def _check_ids(
    ids: Tensor | None, not_negatives: Tensor | None, batch: int, views: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Raise unless the ids fit; return them as (B, V), the pairs, and the validity."""
    if ids is None:
        if not_negatives is not None:
            raise ValueError("not_negatives was given without ids: pass ids= of the batch, or leave it out")
        return None, None, None
    meaning = "one per row of z1, or one per row of each view"
    shape = (batch, views) if isinstance(ids, Tensor) and ids.dim() == 2 else (batch,)
    ids = checks.integers("ids", ids, shape, meaning)
    validity = checks.values(ids >= -1, "ids must be ≥ −1, where −1 means unknown: map other integers to 0, 1, …")
    ids = ids.reshape(batch, -1).expand(batch, views)
    if not_negatives is not None:
        rows = len(not_negatives) if isinstance(not_negatives, Tensor) and not_negatives.dim() == 2 else 0
        not_negatives = checks.integers("not_negatives", not_negatives, (rows, 2), "pairs of ids")
        validity = checks.jointly(validity, checks.values(not_negatives >= 0, "not_negatives must hold ids ≥ 0"))
    return ids, not_negatives, validity


def _check_given(
    batch: int, dim: int, names: Sequence[str], tensors: Sequence[Tensor | None], has_ids: bool
) -> tuple[tuple[Given, ...], Tensor | None]:
    """The sources of given negatives, checked, and their validity.

    tensors: as many of each source as `PER_SOURCE` names, in its order
    """
    found = []
    validities: list[Tensor | None] = []
    for number, name in enumerate(names):
        own = tensors[len(PER_SOURCE) * number : len(PER_SOURCE) * (number + 1)]
        negatives, exclude, labels, mask, ids, guide = own
        if negatives is None:
            for key, tensor in zip(PER_SOURCE[1:], own[1:], strict=True):
                if tensor is not None:
                    raise ValueError(f"{key} was given without negatives: pass negatives= or leave it out")
            continue
        exclude, labels, validity = check_negatives(batch, dim, negatives, exclude, labels, mask, name)
        validities.append(validity)
        if ids is not None:
            if not has_ids:
                raise ValueError("negative_ids were given without ids: pass ids= of the batch, or leave them out")
            where = argument("negative_ids", name)
            ids = checks.integers(where, ids, tuple(negatives.shape[:-1]), "one per negative")
            validities.append(checks.values(ids >= -1, f"{where} must be ≥ −1, where −1 means unknown"))
        found.append(Given(name, negatives, exclude, labels, mask, ids, guide))
    return tuple(found), checks.jointly(*validities)


def prepare(
    z1: Tensor,
    z2: Tensor | None,
    labels: Tensor | None,
    negatives: Tensor | None,
    exclude: Tensor | None,
    negative_labels: Tensor | None,
    negative_mask: Tensor | None,
    positive_mask: Tensor | None,
    ids: Tensor | None = None,
    not_negatives: Tensor | None = None,
    guide1: Tensor | None = None,
    guide2: Tensor | None = None,
    negative_ids: Tensor | None = None,
    negative_guide: Tensor | None = None,
    *others: Tensor | None,
    names: Sequence[str] = (GIVEN,),
    normalize: bool,
    kernel: Kernel,
) -> Inputs:
    """Check shapes, dtypes and values; convert the embeddings to one dtype, and to unit length if ``normalize``.

    names: of the sources of given negatives · others: the tensors of further sources, as `PER_SOURCE` names them
    """
    views = check_views(z1, z2)
    batch, dim = z1.shape
    validities: list[Tensor | None] = []
    if labels is not None:
        labels = checks.integers("labels", labels, (batch,), "one per row of z1")
        validities.append(checks.values(labels >= -1, "labels must be ≥ −1, where −1 means unknown"))
    number = 1 if z2 is None else 2 if z2.dim() == 2 else 1 + z2.shape[1]
    ids, not_negatives, validity = _check_ids(ids, not_negatives, batch, number)
    first = (negatives, exclude, negative_labels, negative_mask, negative_ids, negative_guide)
    given, given_validity = _check_given(batch, dim, names, (*first, *others), ids is not None)
    validities += [validity, given_validity]
    if positive_mask is not None:
        if z2 is None or z2.dim() != 3:
            raise ValueError("positive_mask was given, but z2 is not (B, M, d): pass several positives or leave it out")
        _check_mask("positive_mask", positive_mask, (batch, z2.shape[1]), "True = is a positive")
    given_tensors = [
        ("z2", z2), ("labels", labels), ("positive_mask", positive_mask), ("ids", ids),
        ("not_negatives", not_negatives),
    ]  # fmt: skip
    for source in given:
        parts = (source.rows, source.exclude, source.labels, source.allowed, source.ids)
        given_tensors += [(argument(key, source.name), part) for key, part in zip(PER_SOURCE, parts, strict=False)]
    dtype = torch.promote_types(torch.float32, z1.dtype)
    for name, tensor in given_tensors:
        if tensor is None:
            continue
        if tensor.device != z1.device:
            raise ValueError(f"{name} is on {tensor.device}, but z1 on {z1.device}: move all inputs to one device")
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)

    similarity, precision = None, half_precision(z1, z1 if z2 is None else z2)
    if not normalize and any(source.rows.dtype != precision for source in given):
        precision = None  # it may not represent the negatives exactly
    if normalize and kernel.units is not None and dtype == torch.float32:
        flat, similarity, validity = _units_by_kernel(kernel.units, views, z1, z2, precision)
    else:
        parts_of_views = [z1.to(dtype)]
        if z2 is not None:
            parts_of_views.append((z2 if z2.dim() == 2 else z2.transpose(0, 1).reshape(-1, dim)).to(dtype))
        flat, validity = _checked_vectors(views, torch.cat(parts_of_views), normalize)  # (V·B, d): view after view
    validities.append(validity)
    guide = None
    if guide1 is not None:
        guide, validity = guide_views(z1, z2, guide1, guide2)
        validities.append(validity)
    prepared = []
    for source in given:
        rows, validity = _given_rows(source, dtype, normalize, kernel, precision)
        validities.append(validity)
        of_guide = source.guide
        if of_guide is not None and guide is not None:
            name = argument("negative_guide", source.name)
            of_guide, validity = unit_rows(name, of_guide, source.rows, guide.shape[-1])
            validities.append(validity)
        prepared.append(replace(source, rows=rows, guide=of_guide))
    return Inputs(
        views=flat.view(-1, batch, dim),
        paired=z2 is not None and z2.dim() == 2,
        labels=labels,
        given=tuple(prepared),
        positive_mask=positive_mask,
        ids=ids,
        not_negatives=not_negatives,
        guide=guide,
        similarity=similarity,
        precision=precision,
        validity=checks.jointly(*validities),
    )


def _given_rows(
    source: Given, dtype: torch.dtype, normalize: bool, kernel: Kernel, precision: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """The rows of a source in ``dtype``, of unit length if ``normalize``, and their validity."""
    named = [(argument("negatives", source.name), source.rows)]
    if normalize and kernel.units is not None and dtype == torch.float32:
        rows, _, validity = _units_by_kernel(kernel.units, named, source.rows.flatten(0, -2), None, precision)
        return rows.view(source.rows.shape), validity
    return _checked_vectors(named, source.rows.to(dtype), normalize)


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
    if normalize and not checks.on_accelerator(vectors.device) and vectors.numel() > 0 and is_eager():
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
