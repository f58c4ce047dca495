"""``hardneg data``: published data sets, from archives on this machine or by download, where recipes find them."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hardneg import checks
from hardneg.graphs import tu_files
from hardneg.graphs.data import load_graphs
from hardneg.images import published

TU = tu_files.TU


@dataclass(frozen=True)
class DataSet:
    """A set that recipes can name: ``name`` in the command, ``source`` in a recipe, what it is, whether it is there."""

    name: str
    source: str
    about: str
    present: bool


def known(folder: Path) -> list[DataSet]:
    """The published sets of images, and whether they are in a folder."""
    files = {name: folder / f"{name}.npz" for name in published.SETS}
    return [DataSet(name, str(file), published.SETS[name].about, file.exists()) for name, file in files.items()]


def prepare(name: str, folder: Path, source: str | None = None, download: bool = False) -> DataSet:
    """Put a set where recipes find it: ``NAME.npz`` or ``tu/NAME.zip`` in the folder; one that is there stays as it is.

    name: of a published set of images, or ``tu:NAME`` · source: as for `hardneg.images.published.prepare`, or
    of graphs the zip or its folder · download:
    allow a download
    """
    if name.startswith(TU):
        return _prepare_graphs(name.removeprefix(TU), folder, source, download)
    checks.choice("name", name, (*published.SETS, f"{TU}NAME"))
    target = folder / f"{name}.npz"
    if source is not None and target.exists():
        raise ValueError(f"{target} exists already: remove it, or write to another folder with --to")
    if not target.exists():
        published.prepare(name, target, source, download)
    return DataSet(name, str(target), _described(target), True)


def _prepare_graphs(name: str, folder: Path, source: str | None, download: bool) -> DataSet:
    if source is not None:
        if download:
            raise ValueError("--from and --download are two ways to get one set: leave one out")
        tu_files.copy_zip(name, Path(source).expanduser(), folder / "tu")
    if download and not any(tu_files.holds(place, name) for place in (folder / "tu", *tu_files.folders())):
        tu_files.fetch(name, folder / "tu")
    place = folder / "tu" if tu_files.holds(folder / "tu", name) else tu_files.find(name)
    graphs = load_graphs(name, place)
    about = f"{len(graphs):,} graphs, {len(graphs.classes)} classes, {graphs.node_features} features of a node"
    return DataSet(f"{TU}{name}", f"{TU}{name}", f"{about}, in {place}", True)


def _described(file: Path) -> str:
    """The numbers of images and classes in an .npz file."""
    try:
        with zipfile.ZipFile(file), np.load(file, allow_pickle=False) as arrays:
            counts = [f"{len(arrays[f'{split}_labels']):,} {split}" for split in ("train", "test")]
            return f"{' and '.join(counts)} images, {len(arrays['classes'])} classes"
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ValueError(
            f"{file} is there but cannot be read ({error}): remove it and run the command again"
        ) from error
