"""The arguments of one call of `InfoNCE`, and whether they fit its settings."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from hardneg.losses.guide_inputs import Guide
from hardneg.losses.settings import Settings
from hardneg.losses.sources import PER_SOURCE, SourceTensors, argument, by_name, check_sources


class Call(NamedTuple):
    """The arguments of `InfoNCE.forward`, under their names."""

    z1: Tensor
    z2: Tensor | None
    labels: Tensor | None
    negatives: SourceTensors | None
    exclude: SourceTensors | None
    negative_labels: SourceTensors | None
    negative_mask: SourceTensors | None
    positive_mask: Tensor | None
    ids: Tensor | None
    negative_ids: SourceTensors | None
    not_negatives: Tensor | None
    guide: Guide | None
    negative_guide: SourceTensors | None
    scale: float | Tensor | None

    @property
    def has_short_form(self) -> bool:
        """True if the call has none of the arguments that the short path does not take."""
        return (
            self.negative_labels is None
            and self.negative_ids is None
            and self.positive_mask is None
            and self.ids is None
            and self.not_negatives is None
            and self.guide is None
            and self.negative_guide is None
            and self.scale is None
            and (self.negatives is None or isinstance(self.negatives, Tensor))
        )

    def by_source(self) -> tuple[tuple[str, ...], list[Tensor | None]]:
        """The names of the given sources, and their tensors; see `sources.by_name`."""
        return by_name([getattr(self, name) for name in PER_SOURCE])

    def check(self, settings: Settings) -> None:
        """Raise where the arguments do not fit the settings, or each other."""
        self._check_kinds()
        names, given = self.by_source()
        if settings.by_source is not None and self.negatives is not None:
            check_sources(settings.by_source, names)
        self._check_labels(settings, names, given[PER_SOURCE.index("negative_labels") :: len(PER_SOURCE)])
        z2, supervision, in_batch = self.z2, settings.supervision, settings.in_batch
        if self.negatives is None and in_batch is None:
            raise ValueError("in_batch=None takes no negatives from the batch: pass negatives=")
        if z2 is None and supervision not in ("positives", "full"):
            raise ValueError(
                f"one view needs positives from labels, but supervision={supervision!r}: pass the other view as z2, or "
                "pass labels= to a loss with supervision='full', such as hn.supcon()"
            )
        if z2 is None and in_batch == "other":
            raise ValueError("in_batch='other' needs a second view: pass z2, or set in_batch='both'")
        if isinstance(in_batch, tuple) and (z2 is None or z2.dim() != 2):
            raise ValueError(f"in_batch={in_batch!r} needs one positive for each anchor: pass z2 of shape (B, d)")
        if settings.symmetric and isinstance(z2, Tensor) and z2.dim() == 3:
            raise ValueError(f"symmetric=True needs z2 of shape (B, d), got {tuple(z2.shape)}")
        if self.positive_mask is not None and (in_batch is not None or supervision in ("positives", "full")):
            raise ValueError(
                "positive_mask is for given positives and given negatives: set in_batch=None and take no positives "
                f"from labels, got in_batch={in_batch!r}, supervision={supervision!r}"
            )

    def _check_kinds(self) -> None:
        """Raise if another argument, or none of a loss, was passed as the embeddings or as the labels."""
        given: object = self.z1
        if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
            raise ValueError(
                "z1 must hold embeddings, got the token columns of sentence-transformers: give its trainer "
                "HardNegativeLoss(model, loss) of hardneg.integrations.sentence_transformers"
            )
        if isinstance(self.z2, Tensor) and self.z2.dim() == 1 and not self.z2.is_floating_point():
            raise ValueError(
                f"z2 must hold the embeddings of the other view, got dtype {self.z2.dtype}: pass labels by keyword, "
                "labels="
            )
        if self.labels is not None and not isinstance(self.labels, Tensor):
            raise ValueError(f"labels must be a tensor, got {type(self.labels).__name__}: pass torch.as_tensor(labels)")

    def _check_labels(self, settings: Settings, names: tuple[str, ...], negative_labels: list[Tensor | None]) -> None:
        """Raise unless there are labels where the settings use them, and only there. negative_labels: of each source"""
        supervision = settings.supervision
        if self.labels is not None and supervision == "none":
            raise ValueError(
                "labels were given, but supervision='none' ignores them: use hn.scl(), hn.hscl() or hn.supcon(), set "
                "supervision='full', or leave them out"
            )
        if self.labels is None and supervision != "none":
            raise ValueError(f"supervision={supervision!r} needs labels: pass labels=, with −1 where unknown")
        if supervision == "none" and any(tensor is not None for tensor in negative_labels):
            raise ValueError(
                "negative_labels were given, but supervision='none' ignores them: set supervision or leave them out"
            )
        if self.negatives is not None and supervision in ("negatives", "full"):
            for name, found in zip(names, negative_labels, strict=True):
                if found is None:
                    needed = argument("negative_labels", name)
                    raise ValueError(
                        f"supervision={supervision!r} with negatives needs {needed}, with −1 where unknown"
                    )
