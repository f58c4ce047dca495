"""The explorer's data for a report: the same samples by the encoder of each group."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hardneg.insight.explorer.embedded import Embedded
from hardneg.insight.explorer.page import POSITIVE, page_settings
from hardneg.insight.explorer.run_samples import RunSamples, load_training_samples
from hardneg.insight.explorer.stored import page_data
from hardneg.insight.runs import Group, Run
from hardneg.insight.samples import EncodedSamples, LoadSamples

SAMPLES, BYTES, SUSPECTS = 1000, 2_000_000, 150
GROUPS = 8  # more encoders would leave too few dimensions of each
NOT_USABLE = "The samples are not of a training split: marks of them cannot be used for training."


def explored_groups(groups: Sequence[Group], load: LoadSamples | None, trust: bool = False) -> dict[str, Any] | str:
    """What the explorer of a report holds, or the reason why there is none.

    load: returns the samples of a run folder; None for samples of the training split
    """
    shown: RunSamples | None = None
    reasons: list[str] = []
    left_out: list[str] = []
    for group in groups:
        found = _of_group(group, load, trust)
        if isinstance(found, str):
            reasons.append(found)
            continue
        if shown is None:
            shown = replace(found, samples=replace(found.samples, first=group.name, checkpoint_word="run"))
        elif len(shown.samples.checkpoints) + 1 < GROUPS and _same_samples(shown.samples, found.samples):
            further = {**shown.samples.checkpoints, group.name: found.samples.features}
            second = dict(shown.samples.checkpoint_positives)
            if found.samples.positives is not None:
                second[group.name] = found.samples.positives
            shown = replace(shown, samples=replace(shown.samples, checkpoints=further, checkpoint_positives=second))
        else:
            left_out.append(group.name)
    if shown is None:
        return f"no samples can be read ({reasons[0]})" if reasons else "there are no runs"
    settings, notes = page_settings(shown.loss)
    data = page_data(shown.samples, settings, POSITIVE, SUSPECTS, BYTES)
    if left_out:
        notes.append(f"Not in the explorer, because of other data or their number: {', '.join(left_out)}.")
    data["notes"] += notes
    return data


def _of_group(group: Group, load: LoadSamples | None, trust: bool) -> RunSamples | str:
    """The samples of the first run of a group that can be read, or the reason why there is none."""
    reasons: list[str] = []
    for run in group.runs:
        # Data, weights or a library can be missing in many ways; the rest of the report does not need them.
        try:
            return _of_run(run, load, trust)
        except Exception as error:
            reasons.append(f"{group.name}: {type(error).__name__}: {error}")
    return reasons[0] if reasons else f"{group.name}: no runs"


def _of_run(run: Run, load: LoadSamples | None, trust: bool) -> RunSamples:
    if load is None:
        return load_training_samples(run.folder, SAMPLES, trust=trust)
    return RunSamples(_of_encoded(load(run.folder)), None, "")


def _of_encoded(given: EncodedSamples) -> Embedded:
    texts = [str(given.images[row]) for row in range(len(given.images))] if isinstance(given.images[0], str) else None
    known = given.labels is not None and bool((given.labels >= 0).any())
    samples = Embedded(
        given.features.detach().float().cpu(),
        range(len(given.features)),
        given.labels.cpu().clamp(min=-1) if known and given.labels is not None else None,
        [str(name) for name in given.classes] if known else (),
        texts,
        None if texts is not None else given.images,
        unit=given.unit,
        usable=NOT_USABLE,
    )
    return samples.subset(SAMPLES)


def _same_samples(one: Embedded, other: Embedded) -> bool:
    known = (list(one.ids), one.unit, one.fingerprint)
    if known != (list(other.ids), other.unit, other.fingerprint):
        return False
    if one.labels is None or other.labels is None:
        return one.labels is other.labels
    return torch.equal(one.labels, other.labels)
