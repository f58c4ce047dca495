"""Compare ways of choosing negatives on scikit-learn's digits, on a CPU."""

from hardneg.evaluation.results import notes_of_seeds
from hardneg.training import evaluate, recipe
from hardneg.training.compare import Cell

RECIPE = "digits-simclr"
# Overrides of the recipe for each row.
ROWS = {
    "SimCLR": ["objective={preset: simclr, temperature: 0.5}"],
    "debiased": ["objective={preset: debiased, temperature: 0.5, tau_plus: 0.1}"],
    "HCL": ["objective={preset: hcl, temperature: 0.5, beta: 1.0, tau_plus: 0.1}"],
    "SCL (labels)": ["objective={preset: scl, temperature: 0.5}"],
    "H-SCL (labels)": ["objective={preset: hscl, temperature: 0.5, beta: 1.0}"],
}
# Rows of --all. With ten classes, the nearest tenth of a bank is mostly the anchor's class: the ring ends below it.
_RING = "objective={preset: ring_nce, temperature: 0.2, lower: 0.5, upper: 0.9}"
_BANK = "objective={preset: instance_discrimination, temperature: 0.2}"
_QUEUE = ["method=moco", "memory={queue: 1024, momentum: 0.9}"]
_WALKS = "candidates: 500, neighbors: 100, restart: {schedule: linear, start: 0.2, end: 0.05}, refresh_every: 50"
MORE_ROWS: dict[str, list[str]] = {
    "IR": ["method=instance_discrimination", _BANK],
    "IRing": ["method=instance_discrimination", _RING],
    "MoCo": [*_QUEUE, "objective={preset: moco, temperature: 0.2}"],
    "MoCoRing": [*_QUEUE, _RING],
    "CMC": ["method=cmc", "objective={preset: instance_discrimination, temperature: 0.1}"],
    "LA": [
        "method=local_aggregation",
        _BANK,
        "memory={clusters: 30, repeats: 3, cluster_after: 20, cluster_every: 5, background: 512}",
    ],
    "proximity batches": [f"batches={{sampler: proximity, {_WALKS}}}"],
    "kNN batches": ["batches={sampler: knn, refresh_every: 50}"],
}


def cells(all_rows: bool = False, overrides: tuple[str, ...] = ()) -> list[Cell]:
    """The rows to train; ``all_rows`` adds the methods with a memory and the batch samplers."""
    rows = {**ROWS, **MORE_ROWS} if all_rows else ROWS
    file = recipe.find(RECIPE)
    return [Cell(name, recipe.load(file, [*changes, *overrides])) for name, changes in rows.items()]


def untrained_rows(
    seeds: list[int],
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[str]]]]:
    """Metrics and notes of the rows without training: raw pixels and the untrained encoder."""
    pixels = evaluate.raw(recipe.load(recipe.find(RECIPE)))
    rows: dict[str, dict[str, list[float]]] = {
        "raw pixels": {metric: [value] for metric, value in pixels.items()},
        "untrained": {},
    }
    notes_by_seed: dict[str, dict[int, str]] = {}
    for seed in seeds:
        settings = recipe.load(recipe.find(RECIPE), [f"seed={seed}"])
        untrained = evaluate.untrained(settings)
        for metric, value in untrained.items():
            rows["untrained"].setdefault(metric, []).append(value)
        for metric, note in untrained.notes.items():
            notes_by_seed.setdefault(metric, {})[seed] = note
    notes = {
        "raw pixels": {metric: [note] for metric, note in pixels.notes.items()},
        "untrained": {metric: notes_of_seeds(by_seed) for metric, by_seed in notes_by_seed.items()},
    }
    return rows, notes
