"""Sources of candidates: the batch, and what a call gives, under the names that the caller chose."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from hardneg.losses.hardening import Hardening

BATCH, GIVEN = "batch", "given"
# The arguments of a call that may be mappings by source, in the order in which `by_name` returns their tensors.
PER_SOURCE = ("negatives", "exclude", "negative_labels", "negative_mask", "negative_ids", "negative_guide")


class Memory(ABC):
    """Stored candidates that a call may take as ``negatives``, such as `hardneg.Queue`."""

    @abstractmethod
    def candidates(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The rows, (N, d), and their labels and ids, (N,) each; None for what is not stored."""


SourceTensors = Tensor | Mapping[str, Tensor]  # of the source "given", or of each source by name
Negatives = Tensor | Memory | Mapping[str, Tensor | Memory]
Hardenings = Hardening | tuple[Hardening, ...]


class BySource(Mapping[str, tuple[Hardening, ...]]):
    """The hardenings of each source by name; it cannot be changed, so that a change is an assignment to the loss.

    Examples:
        >>> from hardneg.losses.hardening import Exponential
        >>> BySource({"batch": Exponential(1.0)})
        {'batch': (Exponential(beta=1.0),)}
    """

    def __init__(self, given: Mapping[str, Hardenings]) -> None:
        if not given:
            raise ValueError("hardening={} names no source: use hn.Uniform(), or name one, as in {'batch': …}")
        for name in given:
            _check_name("hardening", name)
        self._parts = {name: part if isinstance(part, tuple) else (part,) for name, part in given.items()}

    def __getitem__(self, name: str) -> tuple[Hardening, ...]:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return repr(self._parts)


def argument(name: str, source: str) -> str:
    """The name of an argument in messages: ``negatives`` or ``negatives['queue']``."""
    return name if source == GIVEN else f"{name}[{source!r}]"


def by_name(arguments: Sequence[SourceTensors | None]) -> tuple[tuple[str, ...], list[Tensor | None]]:
    """The names of the given sources, and their tensors: as many for each source as `PER_SOURCE` has, in its order.

    arguments: those that `PER_SOURCE` names; where negatives are a mapping, the others are mappings with some of its
    names. Without a mapping the one source is ``"given"``, whose tensors may all be None.

    Examples:
        >>> import torch
        >>> by_name([{"mined": torch.zeros(2, 1), "queue": torch.zeros(3, 1)}, *[None] * 5])[0]
        ('mined', 'queue')
    """
    negatives = arguments[0]
    names: tuple[str, ...] = (GIVEN,)
    if isinstance(negatives, Mapping):
        for name in negatives:
            _check_name("negatives", name)
            if name == BATCH:
                raise ValueError("negatives={'batch': …}: 'batch' means the in-batch candidates, choose another name")
        if not negatives:
            raise ValueError("negatives={} names no source: leave it out, or pass {'queue': …}")
        names = tuple(negatives)
    found: dict[tuple[str, str], Tensor] = {}
    for key, given in zip(PER_SOURCE, arguments, strict=True):
        if given is None:
            continue
        if isinstance(given, Mapping) != isinstance(negatives, Mapping) and negatives is not None:
            raise ValueError(
                f"{key} and negatives must both be mappings by source, or both be tensors: got "
                f"{type(given).__name__} and {type(negatives).__name__}"
            )
        parts = given if isinstance(given, Mapping) else {GIVEN: given}
        for name, tensor in parts.items():
            if name not in names:
                raise ValueError(f"{key} names the source {name!r}, but negatives has {', '.join(map(repr, names))}")
            found[name, key] = tensor
    return names, [found.get((name, key)) for name in names for key in PER_SOURCE]


def unpacked(
    negatives: Negatives,
    labels: SourceTensors | None,
    ids: SourceTensors | None,
    *,
    with_labels: bool,
    with_ids: bool,
) -> tuple[SourceTensors, SourceTensors | None, SourceTensors | None]:
    """Negatives, their labels and ids, with each memory replaced by its rows.

    with_labels, with_ids: whether the call uses them; those of a memory are then taken where none are given
    """
    if isinstance(negatives, Memory):
        rows, own_labels, own_ids = negatives.candidates()
        return (
            rows,
            own_labels if with_labels and labels is None else labels,
            own_ids if with_ids and ids is None else ids,
        )
    if not isinstance(negatives, Mapping):
        return negatives, labels, ids
    tables: dict[str, Tensor] = {}
    for name, part in negatives.items():
        if not isinstance(part, Memory):
            tables[name] = part
            continue
        tables[name], own_labels, own_ids = part.candidates()
        labels = _with_source(labels, name, own_labels) if with_labels else labels
        ids = _with_source(ids, name, own_ids) if with_ids else ids
    return tables, labels, ids


def _with_source(given: SourceTensors | None, name: str, own: Tensor | None) -> SourceTensors | None:
    """The tensors by source, with those of a memory unless this source has others."""
    if own is None or isinstance(given, Tensor):  # a tensor does not fit a mapping: `by_name` raises
        return given
    return {name: own, **(given or {})}


def check_sources(hardening: Mapping[str, object], names: Sequence[str]) -> None:
    """Raise if a hardening by source probably misses its source: one name has no source, and one source no name.

    names: of the given sources of a call, () without any
    """
    missing = [name for name in hardening if name not in (BATCH, *names)]
    other = [name for name in names if name not in hardening]
    if missing and other:
        raise ValueError(
            f"hardening names the source {missing[0]!r}, but negatives has {', '.join(map(repr, names))}: use one "
            f"name, or pass an empty tensor (0, d) for {missing[0]!r}"
        )


def _check_name(argument_name: str, name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{argument_name} must have names of sources as keys, such as 'queue', got {name!r}")
