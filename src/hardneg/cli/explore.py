"""``hardneg explore``: the explorer of embeddings from a file or a run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardneg.cli.app import Json, Trust, app, import_from_here
from hardneg.terminal import note, print_json, say

if TYPE_CHECKING:
    from hardneg.insight.explorer.embedded import Embedded
    from hardneg.losses.infonce import InfoNCE

# Modules that take seconds to import (torch) are imported in the command, so that --help is fast.
EXAMPLES = """Examples:

    hardneg explore runs/digits-simclr-1

    hardneg explore embeddings.npy --labels labels.npy --images images/ --to explore.html

    hardneg explore epoch90.npy --checkpoints epoch10.npy --checkpoints epoch50.npy --texts texts.txt"""
_TEXT, _LABEL = ("text", "texts", "sentence"), ("label", "labels", "class")


@app.command(epilog=EXAMPLES)
def explore(
    embeddings: Annotated[
        Path, typer.Argument(help="Embeddings (.npy, .npz, .safetensors, .parquet), or the folder of a run.")
    ],
    to: Annotated[Path, typer.Option(help="The page.")] = Path("explore.html"),
    images: Annotated[Path | None, typer.Option(help="Images: .npy of uint8, or a folder, in order of names.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Texts: .txt, .jsonl, .csv or .parquet.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Labels: .npy, .txt, .jsonl, .csv or .parquet.")] = None,
    positives: Annotated[Path | None, typer.Option(help="Embeddings of a second view of each sample.")] = None,
    checkpoints: Annotated[
        list[Path] | None, typer.Option(help="Embeddings of the same samples at another epoch; may be repeated.")
    ] = None,
    guide: Annotated[Path | None, typer.Option(help="Embeddings by a stronger model, for the suspects.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of setting A [default: the run's, or 0.5].")] = None,
    beta: Annotated[float | None, typer.Option(help="Tilt of setting A [default: the run's, or 0].")] = None,
    class_prior: Annotated[float | None, typer.Option(help="Class prior of setting A [default: as --beta].")] = None,
    ring: Annotated[tuple[float, float] | None, typer.Option(help="Percentiles of setting A, as 0.9 0.99.")] = None,
    samples: Annotated[int, typer.Option(help="Most samples on the page; more are drawn at random.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    export: Annotated[Path | None, typer.Option(help="Also write map, neighbors and weights as .parquet.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a page to choose negatives by eye: sliders, weights, dropped candidates, suspected false negatives."""
    from hardneg.insight.explorer.exported import export_table
    from hardneg.insight.explorer.page import MAX_SAMPLES, POSITIVE, write_embedded
    from hardneg.insight.explorer.settings import shown_setting

    if trust:
        import_from_here()
    if export is not None and export.suffix != ".parquet":
        raise ValueError(f"--export {str(export)!r} must end in .parquet")
    if not 2 <= samples <= MAX_SAMPLES:
        raise ValueError(f"--samples must be from 2 to {MAX_SAMPLES:,}, got {samples}")
    options = {"temperature": temperature, "beta": beta, "prior": class_prior}
    if ring is not None:
        options |= {"lower": ring[0], "upper": ring[1]}
    changes = {key: value for key, value in options.items() if value is not None}
    chosen = _changed(None, changes)  # bad numbers raise before anything is read
    named = {"images": images, "texts": texts, "labels": labels, "positives": positives, "guide": guide}
    files = {name: file for name, file in named.items() if file is not None}
    if (embeddings / "recipe.yaml").exists():
        if given := [*files, *(["checkpoints"] if checkpoints else [])]:
            raise ValueError(f"--{given[0]} is for files of embeddings: a run has its own data, leave it out")
        found, chosen = _of_run(embeddings, samples, seed, trust, changes)
    else:
        found = _of_files(embeddings, files, checkpoints or [])
    written = write_embedded(found, to, chosen, name=embeddings.name, max_samples=samples, seed=seed)
    if export is not None:
        export_table(written.samples, shown_setting(chosen).setting, POSITIVE, export)
    if as_json:
        shown = {"page": str(written.path), "samples": len(written.samples), "of": written.samples.total}
        print_json({**shown, "notes": written.notes, "export": None if export is None else str(export)})
        return
    for text in written.notes:
        note(text)
    say(f"{written.path}: {len(written.samples):,} {written.samples.unit}, {written.path.stat().st_size / 1e6:.1f} MB")
    if export is not None:
        say(str(export))


def _changed(loss: "InfoNCE | None", changes: Mapping[str, float]) -> "InfoNCE":
    """Setting A: a loss (None: uniform) with the numbers that the options give, by their names on the page."""
    from hardneg import InfoNCE, checks
    from hardneg.insight.explorer.settings import loss_of, shown_setting

    loss = loss or InfoNCE()
    if not changes:
        return loss
    if "temperature" in changes:
        checks.number("--temperature", changes["temperature"], above=0, below=float("inf"))
    if "beta" in changes:
        checks.number("--beta", changes["beta"], at_least=0, below=float("inf"))
    return loss_of({**shown_setting(loss).setting, **changes})


def _of_run(
    folder: Path, samples: int, seed: int, trust: bool, changes: Mapping[str, float]
) -> "tuple[Embedded, InfoNCE]":
    from hardneg.insight.explorer.page import not_shown
    from hardneg.insight.explorer.run_samples import load_training_samples

    found = load_training_samples(folder, samples, seed, trust)
    # A loss that options have changed holds only what the page shows: name here what the run's has besides.
    notes = not_shown("the loss of the run", found.loss) if changes and found.loss is not None else []
    return replace(found.samples, notes=[*found.samples.notes, *notes]), _changed(found.loss, changes)


def _of_files(embeddings: Path, files: Mapping[str, Path], checkpoints: list[Path]) -> "Embedded":
    """The samples of files. files: by the names of the options, without those that are not given"""
    from hardneg.insight.explorer.embedded import GivenSamples
    from hardneg.insight.explorer.files import read_array, read_embeddings, read_images

    features, known = read_embeddings(embeddings)
    for name, file in files.items():
        if name == "images":
            known[name] = read_images(file)
        elif name == "texts":
            known[name] = [str(text) for text in _column(file, _TEXT)]
        elif name == "labels":
            known[name] = read_array(file) if file.suffix == ".npy" else _column(file, _LABEL)
        else:
            known[name] = read_embeddings(file).features
    further = {file.stem: read_embeddings(file).features for file in checkpoints}
    if len(further) < len(checkpoints) or embeddings.stem in further:
        raise ValueError("the files of --checkpoints and EMBEDDINGS must have different names, which the page shows")
    found = GivenSamples(features, checkpoints=further, **known).checked()
    return replace(
        found,
        first=embeddings.stem,
        usable="The ids are row numbers: use the marked pairs with a training set of the same order."
        if "ids" not in known
        else "The marked pairs name the ids of the file.",
    )


def _column(path: Path, names: tuple[str, ...]) -> list[Any]:
    from hardneg.mining.texts import read_columns

    return read_columns(path, [names])[0]
