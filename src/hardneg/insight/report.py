"""Write `report.html`: one self-contained page that compares runs and loads nothing else."""

import base64
import functools
import hashlib
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from hardneg import checks
from hardneg.evaluation.metrics import is_number
from hardneg.insight import samples
from hardneg.insight.contents import Contents, Part, breakable, visible
from hardneg.insight.header import facts
from hardneg.insight.parts import PARTS
from hardneg.insight.runs import group_runs, read_run, source_names
from hardneg.training import row_names


def write_report(
    runs: Sequence[str | Path],
    to: str | Path,
    names: Sequence[str] | None = None,
    baseline: str | None = None,
    extra_rows: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    extra_notes: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    load_samples: samples.LoadSamples | None = None,
    *,
    trust: bool = False,
    failed: Mapping[str, str] | None = None,
    heading: str | None = None,
) -> Path:
    """Write one self-contained HTML page that compares runs; returns its path.

    runs: run folders; those that differ only in seed form a group · to: the file, replaced if it exists · names: of
    the groups, one per run or one per group (default: the settings in which they differ) · baseline: the row that
    others are compared with (default: the first group) · extra_rows: values by metric of methods without a run folder,
    as ``{"raw pixels": {"knn": [0.98]}}`` · extra_notes: notes on them by row and metric, as
    ``{"raw pixels": {"linear": ["not converged after 500 iterations"]}}`` · load_samples: returns the images and
    features of a run folder (default: its encoder on its test set); a run whose data or weights are missing is compared
    without them · trust: allow encoders that the folders name as ``module:callable``; without it such a run is compared
    without images and features · failed: the errors of runs that failed, by name, which the page lists · heading: of
    the column of names (default: the settings in which the runs differ)

    Examples:
        >>> import tempfile; folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "recipe.yaml").write_text("seed: 0", encoding="utf-8")
        >>> _ = (folder / "evaluation.json").write_text('{"knn": 0.9}', encoding="utf-8")
        >>> page = write_report([folder], folder / "report.html", names=["mine"], extra_rows={"raw": {"knn": [0.8]}})
        >>> page.name, "raw" in page.read_text(encoding="utf-8")
        ('report.html', True)
    """
    if not runs:
        raise ValueError("runs is empty: pass at least one run folder")
    to = Path(to)
    if to.is_dir():
        raise ValueError(f"to={str(to)!r} is a folder: name a file in it, such as {to / 'report.html'}")
    if load_samples is not None and trust:
        raise ValueError("trust=True is for the encoders of the runs, which load_samples= replaces: leave one out")
    checks.has_folder(to)
    extra = _checked(extra_rows or {})
    groups = group_runs([read_run(run) for run in runs], names)
    duplicates = [name for name in extra if name in {group.name for group in groups}]
    if duplicates:
        raise ValueError(f"extra_rows names {duplicates[0]!r}, which is already a group of runs: choose another name")
    if baseline is not None:
        checks.choice("baseline", baseline, [*(group.name for group in groups), *extra])
    load_samples = load_samples or functools.partial(samples.load_test_samples, trust=trust)
    summaries = {group.name: samples.summarize_group(group, load_samples) for group in groups}
    for name, summary in summaries.items():
        if isinstance(summary, str):
            warnings.warn(f"parts of the report are empty: {name}: {summary}", stacklevel=2)
    if heading is None:
        heading = "method" if extra else row_names.heading([group.runs[0].settings for group in groups])
    contents = Contents(groups, baseline or groups[0].name, extra, summaries, extra_notes or {}, failed or {}, heading)
    # The name cannot be guessed, so that no link can be placed there in advance.
    fresh = to.with_name(f".{secrets.token_hex(8)}-{to.name}")
    try:
        # A name in the page may come from a file name that is not UTF-8.
        fresh.write_text(page(contents), encoding="utf-8", errors="backslashreplace")
        os.replace(fresh, to)
    finally:
        fresh.unlink(missing_ok=True)
    return to


def page(contents: Contents) -> str:
    """The page as HTML."""
    parts = [part(contents) for part in PARTS]
    sources = source_names([run for group in contents.groups for run in group.runs])
    number, groups = sum(len(group.runs) for group in contents.groups), len(contents.groups)
    rows = f" in {_counted(groups, 'row')}; the runs of a row differ only in their seed" if number > groups else ""
    heading = ", ".join(map(breakable, sources))
    return framed(f"hardneg: {', '.join(sources)}", heading, _counted(number, "run") + rows, facts(contents), parts)


def framed(title: str, heading: str, counts: str, facts_html: str, parts: Sequence[Part]) -> str:
    """A page of sections that loads nothing; ``title`` is escaped here, the other texts are HTML."""
    script = _asset("page.js")
    # The content security policy allows this script only, and no requests.
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=visible(title),
        sources=heading,
        counts=counts,
        facts=facts_html,
        navigation="".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in parts),
        parts="".join(part.html() for part in parts),
        style=_asset("page.css"),
        script=script,
        script_hash=allowed,
    )


def _asset(name: str) -> str:
    return resources.files("hardneg.insight").joinpath("page", name).read_text(encoding="utf-8")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _checked(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, list[float]]]:
    for name, row in rows.items():
        for metric, values in row.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(is_number, values)):
                raise ValueError(
                    f"extra_rows[{name!r}][{metric!r}] must be a list of finite numbers, one per seed, got {values!r}"
                )
    return {name: {metric: [*values] for metric, values in row.items()} for name, row in rows.items()}
