"""A loss with the interface of pytorch-metric-learning, for its trainers, miners and `CrossBatchMemory`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.schedules import Setting
from hardneg.losses.temperature import Learnable

_FIXED = ("in_batch", "symmetric", "supervision", "gather")


class NTXentLoss(nn.Module):
    """InfoNCE with any hardening, called as the losses of pytorch-metric-learning are.

    With the default settings it has the values of NTXentLoss of that library, which averages over positive pairs. The
    wrappers there accept a loss by the name of its class, therefore the name.

    Args:
        temperature: number > 0, schedule, or `Learnable`
        settings: further settings of `InfoNCE`, such as ``hardening=hn.Exponential(1.0)``, except ``in_batch``,
            ``symmetric``, ``supervision`` and ``gather``, which follow from the call

    Examples:
        >>> import torch, hardneg as hn
        >>> from hardneg.integrations.metric_learning import NTXentLoss
        >>> loss = NTXentLoss(0.1, hardening=hn.Exponential(1.0))
        >>> loss(torch.randn(8, 16), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).shape
        torch.Size([])
    """

    def __init__(self, temperature: Setting | Learnable = 0.07, **settings: Any) -> None:
        super().__init__()
        for name in _FIXED:
            if name in settings:
                raise ValueError(f"{name}={settings[name]!r} follows from the call: leave it out, or use hn.InfoNCE")
        if isinstance(settings.get("hardening"), Mapping):
            raise ValueError("hardening by source needs the sources of hn.InfoNCE: give one hardening here")
        if settings.get("reduction") == "none":
            raise ValueError("reduction='none' gives no number to train with: use 'mean' or 'sum'")
        settings = {"temperature": temperature, "average": "pairs", **settings}
        self.by_label = InfoNCE(**settings, supervision="full")
        self.by_pairs = InfoNCE(**settings, in_batch=None)
        self._used = "by_label"  # of the two, in the last call; a name, because a module would be a third child

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch.

        embeddings: (B, d) · labels: (B,) integers, −1 = unknown · indices_tuple: pairs (anchors, positives, anchors,
        negatives) or triplets (anchors, positives, negatives), as a miner returns them; each pair counts once ·
        ref_emb: (N, d) rows that anchors are compared with, by default the batch itself · ref_labels: (N,). Anchors
        without a positive or without a negative are left out of the mean. Given pairs or rows take memory for the
        embeddings of all positive pairs.
        """
        checks.floating("embeddings", embeddings)
        if (ref_emb is None) != (ref_labels is None) and indices_tuple is None:
            raise ValueError("ref_emb and ref_labels belong together: pass both or none")
        # Other types than tensors are refused below.
        labels, ref_labels = (y.to(embeddings.device) if isinstance(y, Tensor) else y for y in (labels, ref_labels))
        if indices_tuple is None and ref_emb is None:
            self._used = "by_label"
            return self.by_label(embeddings, labels=labels)  # type: ignore[no-any-return]
        rows = embeddings if ref_emb is None else checks.floating("ref_emb", ref_emb).to(embeddings.device)
        if rows.dim() != 2 or rows.shape[1:] != embeddings.shape[1:]:
            raise ValueError(
                f"ref_emb must have shape (N, d) with d = {embeddings.shape[-1]}, got {tuple(rows.shape)}: use the "
                "model that embedded the batch"
            )
        shape = len(embeddings), len(rows)
        if indices_tuple is None:
            positive, negative = _pairs_by_label(labels, ref_labels, shape)
        else:
            positive, negative = _given_pairs(indices_tuple, shape, embeddings.device)
        number = int(positive.sum(dim=1).max())
        if number == 0:
            return 0 * embeddings.sum()
        places = positive.byte().argsort(dim=1, descending=True, stable=True)[:, :number]  # (B, M)
        self._used = "by_pairs"
        return self.by_pairs(  # type: ignore[no-any-return]
            embeddings,
            rows[places],  # (B, M, d)
            positive_mask=positive.gather(1, places),
            negatives=rows,
            negative_mask=negative,
        )

    def set_progress(self, fraction: float) -> None:
        """Move all schedules to the fraction of training done, in [0, 1]."""
        self.by_label.set_progress(fraction)
        self.by_pairs.set_progress(fraction)

    def diagnostics(self) -> dict[str, float]:
        """Statistics of the negatives of the last call; see `hardneg.InfoNCE.diagnostics`."""
        last: InfoNCE = getattr(self, self._used)
        return last.diagnostics()


def _pairs_by_label(labels: Tensor | None, ref_labels: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which rows are positives and which are negatives of an anchor, (B, N) bool each."""
    if labels is None or ref_labels is None:
        raise ValueError("labels are needed to find positives: pass labels, or indices_tuple")
    labels = checks.integers("labels", labels, shape[:1], "one per row of embeddings")
    ref_labels = checks.integers("ref_labels", ref_labels, shape[1:], "one per row of ref_emb")
    same = labels[:, None] == ref_labels  # (B, N)
    known = (labels >= 0)[:, None]
    return same & known, ~(same & known)


def _given_pairs(indices: tuple[Tensor, ...], shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """As `_pairs_by_label`, from the pairs or triplets of a miner."""
    if len(indices) not in (3, 4):
        raise ValueError(
            "indices_tuple must be (anchors, positives, negatives) or (anchors, positives, anchors, negatives), got "
            f"{len(indices)} tensors"
        )
    meaning = "indices of rows"
    checked = [checks.integers("indices_tuple", part, tuple(getattr(part, "shape", ())), meaning) for part in indices]
    anchor, positive, *others = (part.to(device) for part in checked)
    second, negative = others if len(others) == 2 else (anchor, others[0])
    found = []
    for rows, columns in ((anchor, positive), (second, negative)):
        if len(rows) != len(columns):
            raise ValueError(f"indices_tuple has {len(rows)} anchors for {len(columns)} rows: pass one for each")
        for part, size in ((rows, shape[0]), (columns, shape[1])):
            checks.in_range("indices_tuple", part, size)
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        mask[rows, columns] = True
        found.append(mask)
    return found[0], found[1]
