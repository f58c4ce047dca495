"""The head of a report: which data, encoder, training and version its runs have in common."""

import re
from collections.abc import Iterable, Sequence

from hardneg.insight.contents import Contents, breakable
from hardneg.insight.runs import Run

_MOST = 4  # values of one setting that are listed
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?=T)")


def facts(contents: Contents) -> str:
    """Encoder, epochs, batch size, device, date and version of the runs as HTML, each with all of its values."""
    runs = [run for group in contents.groups for run in group.runs]
    shown = {
        "encoder": _setting(runs, "encoder.name"),
        "epochs": _setting(runs, "trainer.epochs"),
        "batch size": _setting(runs, "trainer.batch_size"),
        "device": _distinct(run.environment.get("device") for run in runs),
        "trained": _dates(runs),
        "hardneg": _distinct(run.environment.get("hardneg") for run in runs),
    }
    return "".join(
        f"<div><dt>{label}</dt><dd>{', '.join(map(breakable, values))}</dd></div>"
        for label, values in shown.items()
        if values
    )


def _setting(runs: Iterable[Run], key: str) -> list[str]:
    return _distinct(run.settings.get(key) for run in runs)


def _distinct(values: Iterable[object]) -> list[str]:
    """Each value once; of many, the first few and an ellipsis."""
    found = list(dict.fromkeys(str(value) for value in values if isinstance(value, str | int | float)))
    return found if len(found) <= _MOST else [*found[:_MOST], "…"]


def _dates(runs: Sequence[Run]) -> list[str]:
    """The day on which the runs were started, or the first and the last one."""
    started = [_DATE.match(str(run.environment.get("started"))) for run in runs]
    days = sorted({day[0] for day in started if day is not None})
    return days if len(days) < 2 else [f"{days[0]} to {days[-1]}"]
