"""Settings of `InfoNCE` as given: checked together, and with every schedule replaced by its number."""

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch

from hardneg import checks, distributed
from hardneg.losses import settings as options
from hardneg.losses.debiasing import Prior
from hardneg.losses.hardening import Hardening
from hardneg.losses.schedules import Adaptive, Schedule
from hardneg.losses.settings import Settings, SourceHardening
from hardneg.losses.sources import BATCH, BySource
from hardneg.losses.temperature import Learnable, check_no_gradient

CHOICES: dict[str, tuple[str, ...]] = {
    "debias": get_args(options.Debias),
    "supervision": options.SUPERVISION,
    "combine_positives": get_args(options.CombinePositives),
    "average": get_args(options.Average),
    "backend": get_args(options.Backend),
    "reduction": options.REDUCTION,
}
FLAGS = ("symmetric", "positive_in_denominator", "grad_through_weights", "normalize_weights", "normalize")
# Settings that are the same in `Settings` as given.
UNCHANGED = (
    "debias", "in_batch", "symmetric", "supervision", "combine_positives", "average", "negative_count",
    "positive_in_denominator", "num_negatives", "weight_range", "grad_through_weights", "normalize_weights",
    "normalize", "gather", "reduction",
)  # fmt: skip


def check(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with numbers as Python numbers; raises unless each is in its range and fits the others."""
    given = dict(given)
    temperature, hardening = given["temperature"], given["hardening"]
    check_no_gradient("temperature", temperature)
    if not isinstance(temperature, Learnable):
        given["temperature"] = checks.number("temperature", temperature, above=0, below=math.inf)
    given["class_prior"] = checks.number("class_prior", given["class_prior"], at_least=0, below=1)
    given["hardening"] = _checked_hardening(hardening, given["backend"])
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            checks.choice(name, given[name], choices)
    given["in_batch"] = _checked_in_batch(given["in_batch"])
    for name in FLAGS:
        if not isinstance(given[name], bool):
            given[name] = checks.boolean(name, given[name])
    if not isinstance(given["gather"], bool):
        given["gather"] = distributed.checked("gather", given["gather"])
    if given["symmetric"] and given["in_batch"] != "other":
        raise ValueError(f"symmetric=True needs in_batch='other', got in_batch={given['in_batch']!r}")
    if given["combine_positives"] == "in_denominator" and not given["positive_in_denominator"]:
        raise ValueError("combine_positives='in_denominator' contradicts positive_in_denominator=False: change one")
    if not isinstance(given["negative_count"], str):
        given["negative_count"] = _number("negative_count", given["negative_count"])
    elif given["negative_count"] not in get_args(options.NegativeCount):
        checks.choice("negative_count", given["negative_count"], get_args(options.NegativeCount))
    if given["num_negatives"] is not None:
        given["num_negatives"] = checks.whole("num_negatives", given["num_negatives"])
    if isinstance(given["hardening"], BySource):
        _check_by_source(given)
    if isinstance(given["in_batch"], tuple):
        _check_directions(given)
    if not given["normalize_weights"] and given["class_prior"] != 0:
        raise ValueError(
            f"normalize_weights=False contradicts class_prior={given['class_prior']!r}: debiasing needs normalized "
            "weights, set class_prior=0"
        )
    if given["weight_range"] is not None:
        given["weight_range"] = _number("weight_range", given["weight_range"])
    if given["generator"] is not None and not isinstance(given["generator"], torch.Generator):
        raise ValueError(f"generator must be a torch.Generator or None, got {given['generator']!r}")
    return given


def _checked_hardening(hardening: Any, backend: str, source: str | None = None) -> tuple[Hardening, ...] | BySource:
    """A hardening as a tuple of parts, or by source; raises unless they are hardenings with at most one tilt."""
    if source is None and isinstance(hardening, Mapping):
        by_source = BySource(hardening)
        for name, part in by_source.items():
            _checked_hardening(part, backend, name)
        return by_source
    name = "hardening" if source is None else f"hardening[{source!r}]"
    parts = hardening if isinstance(hardening, tuple) else (hardening,)
    weighted = 0
    for part in parts:
        if not isinstance(part, Hardening):
            kinds = "a Hardening or a tuple of them" + (", or a mapping of them by source" if source is None else "")
            raise ValueError(f"{name} must be {kinds}, got {part!r}")
        weighted += part.has_weights
        if part.has_general_weights and backend in ("tiled", "fused"):
            raise ValueError(f"backend={backend!r} cannot run Custom weights: use backend='reference' or 'auto'")
    if weighted > 1:
        raise ValueError(f"{name} takes at most one tilt (Exponential or Custom), got {parts!r}")
    return parts


def _checked_in_batch(in_batch: Any) -> Any:
    """``in_batch`` with directions as a tuple; raises unless it is one of its values."""
    if not isinstance(in_batch, tuple | list):
        if in_batch is not None and in_batch not in ("both", "other"):
            checks.choice("in_batch", in_batch, ("both", "other"))
        return in_batch
    for direction in in_batch:
        checks.choice("in_batch", direction, options.DIRECTIONS)
    if "query_to_doc" not in in_batch or len(set(in_batch)) < len(in_batch):
        raise ValueError(f"in_batch must have 'query_to_doc' and each direction once, got {in_batch!r}")
    return tuple(in_batch)


def _check_directions(given: dict[str, Any]) -> None:
    """Raise where other settings do not fit several directions, of which each is a distribution of its own."""
    refused = {
        "class_prior": given["class_prior"] != 0,
        "num_negatives": given["num_negatives"] is not None,
        "negative_count": not isinstance(given["negative_count"], str),
        "supervision": given["supervision"] in ("positives", "full"),
    }
    for name, found in refused.items():
        if found:
            raise ValueError(f"{name}={given[name]!r} does not fit in_batch with directions: use 'both' or 'other'")


def _check_by_source(given: dict[str, Any]) -> None:
    """Raise where other settings do not fit a hardening by source."""
    if not isinstance(given["negative_count"], str):
        raise ValueError(
            f"negative_count={given['negative_count']!r} does not fit a hardening by source, where each source has its "
            "own Q: use 'support' or 'batch'"
        )
    if given["num_negatives"] is not None:
        raise ValueError(
            f"num_negatives={given['num_negatives']!r} does not fit a hardening by source: draw from one distribution, "
            "with a single hardening"
        )
    if given["in_batch"] is None:
        if BATCH in given["hardening"]:
            raise ValueError("hardening has the source 'batch', but in_batch=None has no candidates of it: remove one")
        if given["class_prior"] != 0:
            raise ValueError(
                f"class_prior={given['class_prior']!r} debiases the batch only if hardening is by source, and "
                "in_batch=None has no candidates of it: give a single hardening, or set class_prior=0"
            )


def resolve(given: dict[str, Any], progress: float) -> Settings:
    """The settings at this progress. given: by the names of `InfoNCE`'s arguments, as `check` returns them."""
    temperature, prior = given["temperature"], given["class_prior"]
    if isinstance(temperature, Schedule):
        temperature = checks.number("temperature", temperature.at(progress), above=0, below=math.inf)
    if isinstance(prior, Schedule):
        prior = checks.number("class_prior", prior.at(progress), at_least=0, below=1)
    hardening, by_source = given["hardening"], None
    if isinstance(hardening, BySource):
        by_source = {name: _source_hardening(parts, progress, temperature) for name, parts in hardening.items()}
        own = by_source.get(BATCH, SourceHardening())
    else:
        own = _source_hardening(hardening, progress, temperature)
    bands = [band for part in ([own] if by_source is None else by_source.values()) for band in part.bands]
    max_abs_score = None
    if given["normalize"]:
        max_abs_score = 1 / (temperature.minimum if isinstance(temperature, Learnable) else temperature)
    unchanged = {}
    for name in UNCHANGED:
        unchanged[name] = given[name]
    return Settings(
        temperature=temperature,
        weighting=own.weighting,
        bands=own.bands,
        needs_positive=any(band.needs_positive for band in bands),
        needs_guide=any(band.needs_guide for band in bands),
        prior=Prior.of(prior) if prior > 0 else None,
        max_abs_score=max_abs_score,
        learned_scale=isinstance(temperature, Learnable),
        by_source=by_source,
        cosine_bands=_has_cosines(hardening, progress, temperature),
        **unchanged,
    )


def _source_hardening(parts: tuple[Hardening, ...], progress: float, temperature: float | Learnable) -> SourceHardening:
    """The parts at this progress, in terms of scores."""
    weighting, bands = None, []
    for setting in parts:
        part = setting.at(progress).in_scores(temperature)
        weighting = part if part.has_weights else weighting
        if part.has_band:
            bands.append(part)
    return SourceHardening(weighting, tuple(bands))


def _has_cosines(hardening: tuple[Hardening, ...] | BySource, progress: float, temperature: float | Learnable) -> bool:
    """Whether a part is given in terms of cosines, so that its scores depend on the temperature."""
    for parts in hardening.values() if isinstance(hardening, BySource) else (hardening,):
        for part in parts:
            now = part.at(progress)
            if now.in_scores(temperature) is not now:
                return True
    return False


def schedules(given: dict[str, Any]) -> list[Schedule]:
    """The schedules among the settings."""
    settings, hardening = [given["temperature"], given["class_prior"]], given["hardening"]
    for parts in hardening.values() if isinstance(hardening, BySource) else (hardening,):
        for part in parts:
            settings += part.schedules()
    return [setting for setting in settings if isinstance(setting, Schedule)]


def adaptive_schedules(given: dict[str, Any]) -> tuple[Adaptive, ...]:
    """The adaptive schedules among the settings, each once, in a fixed order."""
    leaves = [leaf for schedule in schedules(given) for leaf in schedule.leaves()]
    return tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, Adaptive)}.values())


def _number(name: str, given: Any) -> float:
    """A positive, finite number; raises for a schedule."""
    if isinstance(given, Schedule):
        raise ValueError(f"{name} must be a number, got the schedule {given!r}")
    return float(checks.number(name, given, above=0, below=math.inf))
