"""``hardneg explore``: the explorer of embeddings from a file or a run."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardneg.cli.app import Json, Trust, app, import_from_here
from hardneg.terminal import note, print_json, say

if TYPE_CHECKING:
    from hardneg.insight.explorer.embedded import Embedded
    from hardneg.losses.hardening import Hardening
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
    beta: Annotated[float | None, typer.Option(help="Tilt of setting A.")] = None,
    class_prior: Annotated[float | None, typer.Option(help="Class prior of setting A.")] = None,
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
    chosen = _setting(temperature, beta, class_prior, ring)
    if (embeddings / "recipe.yaml").exists():
        given = {"--images": images, "--texts": texts, "--labels": labels, "--positives": positives}
        for name, value in {**given, "--checkpoints": checkpoints, "--guide": guide}.items():
            if value:
                raise ValueError(f"{name} is for files of embeddings: a run has its own data, leave it out")
        found, loss = _of_run(embeddings, samples, seed, trust)
    else:
        found = _of_files(embeddings, images, texts, labels, positives, checkpoints or [], guide)
        loss = None
    written = write_embedded(found, to, chosen or loss, name=embeddings.name, max_samples=samples, seed=seed)
    if export is not None:
        setting = shown_setting(chosen or loss or _uniform()).setting
        export_table(written.samples, setting, POSITIVE, export)
    if as_json:
        shown = {"page": str(written.path), "samples": len(written.samples), "of": written.samples.total}
        print_json({**shown, "notes": written.notes, "export": None if export is None else str(export)})
        return
    for text in written.notes:
        note(text)
    say(f"{written.path}: {len(written.samples):,} {written.samples.unit}, {written.path.stat().st_size / 1e6:.1f} MB")
    if export is not None:
        say(str(export))


def _uniform() -> "InfoNCE":
    import hardneg as hn

    return hn.InfoNCE()


def _setting(
    temperature: float | None, beta: float | None, class_prior: float | None, ring: tuple[float, float] | None
) -> "InfoNCE | None":
    """The loss that the options describe; None if there are none."""
    if temperature is None and beta is None and class_prior is None and ring is None:
        return None
    import hardneg as hn

    parts: list[Hardening] = [hn.Ring(*ring)] if ring is not None else []
    parts += [hn.Exponential(beta)] if beta else []
    hardening: Any = tuple(parts) or hn.Uniform()
    return hn.InfoNCE(0.5 if temperature is None else temperature, hardening, class_prior=class_prior or 0.0)


def _of_run(folder: Path, samples: int, seed: int, trust: bool) -> "tuple[Embedded, InfoNCE | None]":
    from hardneg.insight.explorer.run_samples import load_training_samples

    found = load_training_samples(folder, samples, seed, trust)
    return found.samples, found.loss


def _of_files(
    embeddings: Path,
    images: Path | None,
    texts: Path | None,
    labels: Path | None,
    positives: Path | None,
    checkpoints: list[Path],
    guide: Path | None,
) -> "Embedded":
    from hardneg.insight.explorer.embedded import embedded
    from hardneg.insight.explorer.files import read_array, read_embeddings, read_images

    features, known = read_embeddings(embeddings)
    if images is not None:
        known["images"] = read_images(images)
    if texts is not None:
        known["texts"] = [str(text) for text in _column(texts, _TEXT)]
    if labels is not None:
        known["labels"] = read_array(labels) if labels.suffix == ".npy" else _column(labels, _LABEL)
    if positives is not None:
        known["positives"] = read_embeddings(positives).features
    if guide is not None:
        known["guide"] = read_embeddings(guide).features
    further = {file.stem: read_embeddings(file).features for file in checkpoints}
    if len(further) < len(checkpoints) or embeddings.stem in further:
        raise ValueError("the files of --checkpoints and EMBEDDINGS must have different names, which the page shows")
    found = embedded(features, checkpoints=further, **known)
    return replace(
        found,
        first=embeddings.stem,
        usable="The ids are row numbers, or those of the file: use the marks with a training set of the same order."
        if "ids" not in known
        else "The marked pairs name the ids of the file.",
    )


def _column(path: Path, names: tuple[str, ...]) -> list[Any]:
    from hardneg.mining.texts import read_columns

    return read_columns(path, [names])[0]
