"""Write the explorer's page from arrays."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.insight.contents import breakable
from hardneg.insight.explorer.embedded import Embedded, GivenSamples, Id
from hardneg.insight.explorer.section import section
from hardneg.insight.explorer.settings import shown_setting
from hardneg.insight.explorer.stored import page_data
from hardneg.insight.frame import checked_target, framed, write_page
from hardneg.insight.samples import Images
from hardneg.losses.infonce import InfoNCE

MAX_SAMPLES, MAX_BYTES = 5000, 20_000_000
SUSPECTS = 300  # pairs to review
POSITIVE = 0.9  # cosine of a positive that is not given


class Written(NamedTuple):
    """A page that was written: its path, the samples it shows, and the notes at its top."""

    path: Path
    samples: Embedded
    notes: list[str]


def write_explorer(
    features: TensorLike,
    to: str | Path,
    *,
    labels: TensorLike | Sequence[Any] | None = None,
    classes: Sequence[str] = (),
    texts: Sequence[str] | None = None,
    images: Images | NDArray[Any] | None = None,
    ids: Sequence[Id] | None = None,
    positives: TensorLike | None = None,
    checkpoints: Mapping[str, TensorLike] | None = None,
    guide: TensorLike | None = None,
    loss: InfoNCE | None = None,
    other: InfoNCE | None = None,
    positive: float = POSITIVE,
    name: str = "embeddings",
    max_samples: int = MAX_SAMPLES,
    seed: int = 0,
) -> Written:
    """Write one self-contained HTML page in which the negatives of embeddings are explored, under any setting.

    features: (N, d), N ≥ 2 · to: the file, replaced if it exists · labels: (N,) whole numbers or texts, unknown where
    negative or empty · classes: names of the numbers · texts: shown as text · images: (N, H, W), (N, H, W, C) or
    (N, C, H, W) uint8, or a sequence of (C, H, W), shown as thumbnails · ids: of the samples, which the file of marked
    pairs names (default: row numbers) · positives: (N, d) a second view of each sample; without it, ``positive`` is the
    cosine of every anchor's positive · checkpoints: features (N, d') of the same samples by name, such as of other
    epochs · guide: (N, d') features of a stronger model, for the suspected false negatives · loss, other: the settings
    A and B at the beginning (default: uniform, and β = 1) · name: in the heading · max_samples: more are subsampled by
    ``seed``

    Examples:
        >>> import tempfile, torch
        >>> file = Path(tempfile.mkdtemp()) / "explore.html"
        >>> write_explorer(torch.randn(30, 8), file, labels=torch.arange(30) % 3).path.name
        'explore.html'
    """
    given = GivenSamples(features, labels, classes, texts, images, ids, positives, checkpoints, guide)
    return write_embedded(given.checked(), to, loss, other, positive, name, max_samples, seed)


def write_embedded(
    samples: Embedded,
    to: str | Path,
    loss: InfoNCE | None = None,
    other: InfoNCE | None = None,
    positive: float = POSITIVE,
    name: str = "embeddings",
    max_samples: int = MAX_SAMPLES,
    seed: int = 0,
) -> Written:
    """As `write_explorer`, of samples that are checked already."""
    to = checked_target(to, "explore.html")
    positive = float(checks.number("positive", positive, at_least=-1, at_most=1))
    count = checks.whole("max_samples", max_samples, 2)
    settings, left_out = page_settings(loss, other)
    shown = samples.subset(count, seed)
    while True:
        data = page_data(shown, settings, positive, SUSPECTS, MAX_BYTES)
        data["notes"] += left_out
        counts = f"{len(shown):,} {escape(shown.unit)}"
        html = framed(f"hardneg explorer: {name}", breakable(name), counts, "", [section(data)])
        size = len(html.encode("utf-8", "backslashreplace"))
        if size <= MAX_BYTES or len(shown) <= 2:  # long ids or classes may exceed the share that is planned for them
            break
        shown = shown.subset(max(2, int(0.9 * len(shown) * MAX_BYTES / size)), seed)
    return Written(write_page(to, html), shown, data["notes"])


def page_settings(loss: InfoNCE | None, other: InfoNCE | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The settings A and B of the page, and notes on what it cannot show."""
    first = shown_setting(loss or InfoNCE())
    notes = not_shown("the loss of setting A", loss)
    if other is not None:
        return [first.setting, shown_setting(other).setting], notes + not_shown("the loss of setting B", other)
    # B shows what the hardening of A does, or, if it has none, what a tilt would do.
    plain = {"temperature": first.setting["temperature"], "labels": first.setting["labels"]}
    hardened = len(first.setting) > 4 or first.setting["beta"] > 0 or first.setting["prior"] > 0
    return [first.setting, plain if hardened else plain | {"beta": 1.0}], notes


def not_shown(name: str, loss: InfoNCE | None) -> list[str]:
    """A note on what the page does not show of a loss, if there is anything."""
    left_out = [] if loss is None else shown_setting(loss).left_out
    return [f"Not shown of {name}: {', '.join(left_out)}."] if left_out else []
