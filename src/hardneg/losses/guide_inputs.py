"""The embeddings of a guide model, as one call passes them: checked, and scaled to unit length."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hardneg import checks
from hardneg.losses.settings import Settings
from hardneg.losses.sources import PER_SOURCE, argument

Guide = Tensor | Sequence[Tensor]  # of the one view, or of both


def check_guide(
    settings: Settings, guide: Guide | None, z2: Tensor | None, names: Sequence[str], given: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Raise unless a guide is given where the settings need one, and only there; return it for z1 and for z2.

    names, given: as `sources.by_name` returns them
    """
    width = len(PER_SOURCE)
    rows, of_negatives = given[::width], given[PER_SOURCE.index("negative_guide") :: width]
    if not settings.needs_guide:
        if guide is not None or any(part is not None for part in of_negatives):
            raise ValueError("a guide was given, but no hardening uses it: add hn.Guided(), or leave it out")
        return None, None
    if guide is None:
        raise ValueError("hn.Guided needs the embeddings of a guide model: pass guide=(g1, g2)")
    for name, tensor, found in zip(names, rows, of_negatives, strict=True):
        if tensor is not None and found is None and settings.is_guided(name):
            needed = argument("negative_guide", name)
            raise ValueError(f"hn.Guided with negatives needs {needed}: pass the guide's embeddings of them")
    parts = [guide] if isinstance(guide, Tensor) else list(guide)
    if len(parts) != (1 if z2 is None else 2):
        raise ValueError(
            f"guide must have the embeddings of {'z1' if z2 is None else 'z1 and of z2'}, got {len(parts)} tensors"
        )
    return parts[0], None if z2 is None else parts[1]


def guide_views(z1: Tensor, z2: Tensor | None, guide1: Tensor, guide2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The guide's unit vectors of all views, (V, B, e), without gradient, and their validity; see `checks.values`.

    guide1: (B, e) · guide2: (B, e) or (B, M, e), as z2
    """
    checks.floating("guide[0]", guide1)
    if guide1.dim() != 2 or len(guide1) != len(z1) or guide1.shape[1] == 0:
        raise ValueError(f"guide[0] must have shape (B, e) with B = {len(z1)}, got {tuple(guide1.shape)}")
    first, validity = unit_rows("guide[0]", guide1, z1, guide1.shape[1])
    if z2 is None or guide2 is None:
        return first[None], validity
    second, of_second = unit_rows("guide[1]", guide2, z2, guide1.shape[1])
    second = second[None] if second.dim() == 2 else second.transpose(0, 1)  # (V − 1, B, e)
    return torch.cat([first[None], second.to(first.dtype)]), checks.jointly(validity, of_second)


def unit_rows(name: str, guide: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """The guide's unit vectors of ``rows`` (…, d), (…, e), and their validity."""
    checks.floating(name, guide)
    shape = (*rows.shape[:-1], width)
    if tuple(guide.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(guide.shape)}")
    if guide.device != rows.device:
        raise ValueError(f"{name} is on {guide.device}, but z1 on {rows.device}: move all inputs to one device")
    guide = guide.detach().to(torch.promote_types(torch.float32, guide.dtype))
    validity = checks.finite(name, guide)
    largest = guide.abs().amax(dim=-1, keepdim=True) if guide.numel() else guide.sum()
    # Divided by the largest entry first, so that no square overflows; a vector of zeros stays zero.
    moderate = guide / largest.clamp(min=torch.finfo(guide.dtype).tiny)
    return torch.nn.functional.normalize(moderate, dim=-1), validity
