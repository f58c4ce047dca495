"""Files of the TU collection: text files in a folder or a zip, adjacency bits in an .npz, and their download."""

import os
import re
import secrets
import shutil
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from hardneg import checks
from hardneg.downloads import download
from hardneg.extras import required

TU = "tu:"  # prefix of the sets of the collection in a recipe
FOLDER = Path("data", "tu")  # below the working directory
_COMMON = ("MUTAG", "PTC_MR", "ENZYMES", "PROTEINS", "DD", "NCI1", "COLLAB", "IMDB-BINARY", "IMDB-MULTI",
           "REDDIT-BINARY", "REDDIT-MULTI-5K")  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def folders() -> list[Path]:
    """Where sets are searched: ``data/tu``, then ``$HARDNEG_DATA/tu``."""
    home = os.environ.get("HARDNEG_DATA")
    return [FOLDER, *([Path(home).expanduser() / "tu"] if home else [])]


def holds(folder: Path, name: str) -> bool:
    """Whether a folder has the files of a set."""
    return any((folder / entry).exists() for entry in (f"{name}.npz", f"{name}.zip", name))


def find(name: str) -> Path:
    """The first of the folders that holds a set."""
    searched = folders()
    for folder in searched:
        if holds(folder, name):
            return folder
    available = sorted({entry.stem for folder in searched for entry in folder.glob("*")})
    meant = [other for other in (*available, *_COMMON) if other.lower() == name.lower() and other != name]
    hint = f"did you mean {TU}{meant[0]}? Or " if meant else ""
    raise FileNotFoundError(
        f"{TU}{name} is not in {' or '.join(map(str, searched))}, which {'have' if len(searched) > 1 else 'has'} "
        f"{', '.join(available) or 'no sets'}: {hint}put {name}.zip or the folder {name}/ of its text files into "
        f"{FOLDER}, or download it with hardneg data {TU}{name} --download"
    )


def fetch(name: str, folder: Path = FOLDER) -> Path:
    """Download the zip of a set from the collection's site."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{TU}{name} is not the name of a set of the TU collection: give one such as {TU}MUTAG")
    site = required("torch_geometric.datasets", "graph").TUDataset.url
    file = download(f"{site}/{name}.zip", folder / f"{name}.zip")
    if not zipfile.is_zipfile(file):
        file.unlink()
        raise ValueError(f"{site}/{name}.zip is not a zip file: check the name, or put {name}.zip into {folder}")
    return file


def copy_zip(name: str, source: Path, folder: Path) -> Path:
    """Copy the zip of a set, after reading it, to a folder. source: the zip, or a folder that holds ``NAME.zip``"""
    archive = source / f"{name}.zip" if source.is_dir() else source
    if not archive.exists():
        text = f"; for a folder of text files, set data.source={source}" if source.is_dir() else ""
        raise FileNotFoundError(f"{archive} does not exist: give {name}.zip, or a folder that holds it{text}")
    if holds(folder, name):
        raise ValueError(f"{folder} has {name} already: remove it, or write to another folder with --to")
    read_zip(archive, name, attributes=True)  # raises unless it is the set
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.zip"
    part = folder / f".{secrets.token_hex(8)}-{target.name}"
    try:
        shutil.copyfile(archive, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def read(folder: Path, name: str, attributes: bool) -> list[Any]:
    """The PyG graphs of a set; attributes: with the continuous attributes of its nodes."""
    if (packed := folder / f"{name}.npz").exists():
        return read_packed(packed)
    archive, texts = folder / f"{name}.zip", folder / name
    if archive.exists() and not any(texts.glob(f"**/{name}_A.txt")):
        return read_zip(archive, name, attributes)
    if texts.is_dir():
        return read_texts(*text_files(texts, name), attributes)
    available = ", ".join(sorted({entry.stem for entry in folder.glob("*")})) or "nothing"
    raise FileNotFoundError(
        f"{name!r} is not in {folder}, which has {available}: check the name, or download it with "
        f"hardneg data {TU}{name} --download"
    )


def text_files(folder: Path, name: str | None = None) -> tuple[Path, str]:
    """The folder of a set's text files, ``folder`` or ``folder/raw``, and the set's name."""
    wanted = f"{'*' if name is None else name}_A.txt"
    for place in (folder, folder / "raw"):
        found = sorted(file.name.removesuffix("_A.txt") for file in place.glob(wanted))
        if len(found) > 1:
            raise ValueError(f"{place} holds several sets, {', '.join(found)}: put each into a folder of its own")
        if found:
            return place, found[0]
    raise FileNotFoundError(
        f"{folder} has no {wanted.replace('*', 'NAME')}, the edges of a TU set: copy or download the set again"
    )


def read_zip(archive: Path, name: str, attributes: bool) -> list[Any]:
    """Graphs from a zip of the text files, in a folder NAME/raw/ or NAME/."""
    with tempfile.TemporaryDirectory() as unpacked:  # the data's own folder may not be writable
        try:
            with zipfile.ZipFile(checks.regular_file(archive)) as files:
                for member in files.namelist():
                    if (path := PurePosixPath(member)).name.startswith(f"{name}_") and path.suffix == ".txt":
                        Path(unpacked, path.name).write_bytes(files.read(member))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise _unreadable(archive, error) from error
        if not Path(unpacked, f"{name}_A.txt").exists():
            raise FileNotFoundError(f"{archive} has no {name}_A.txt: copy or download the set again")
        return read_texts(Path(unpacked), name, attributes)


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = str(error).partition("\n")[0]
    return ValueError(f"{path} cannot be read ({type(error).__name__}: {reason}): copy or download the set again")


def read_texts(folder: Path, name: str, attributes: bool) -> list[Any]:
    """Graphs from the raw text files of the collection.

    PyG's ``TUDataset`` would load ``processed/data.pt`` next to them instead, a pickle that may run any code.
    """
    for file in folder.glob(f"{name}_*.txt"):
        checks.regular_file(file)
    read_tu_data = required("torch_geometric.io", "graph").read_tu_data
    graph_class = required("torch_geometric.data", "graph").Data
    try:
        data, slices, widths = read_tu_data(str(folder), name)
    except (ValueError, IndexError, KeyError, TypeError, AssertionError, RuntimeError) as error:
        raise _unreadable(folder, error) from error
    sizes = slices["x"].diff() if "x" in slices else torch.tensor(data._num_nodes)  # (N,)
    x = None if data.x is None else data.x[:, 0 if attributes else widths["num_node_attributes"] :]
    edge_attr = None if data.edge_attr is None else data.edge_attr[:, widths["num_edge_attributes"] :]
    y = data.y
    if y is not None and (y.is_floating_point() or len(y) != len(sizes)):
        warnings.warn(f"{name} has targets that are not classes of graphs: it is read without labels", stacklevel=4)
        y = None
    nodes = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])  # (N + 1,)
    # PyG counts edges up to the last graph that has any.
    edges = slices["edge_index"][torch.arange(len(nodes)).clamp(max=len(slices["edge_index"]) - 1)]  # (N + 1,)
    return [
        graph_class(
            x=None if x is None else x[nodes[number] : nodes[number + 1]],
            edge_index=data.edge_index[:, edges[number] : edges[number + 1]],
            edge_attr=None if edge_attr is None else edge_attr[edges[number] : edges[number + 1]],
            y=None if y is None else y[number],
            num_nodes=int(sizes[number]),
        )
        for number in range(len(sizes))
    ]


def read_packed(path: Path) -> list[Any]:
    """Graphs from an .npz of ``num_nodes`` (N,), ``labels`` (N,) and the bits of all upper triangles."""
    checks.regular_file(path)
    graph_class = required("torch_geometric.data", "graph").Data
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as stored:
            if missing := {"num_nodes", "labels", "triu_bits"} - set(stored.files):
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            sizes, packed = stored["num_nodes"].astype(np.int64), stored["triu_bits"]
            _, labels = np.unique(stored["labels"], return_inverse=True)
        if sizes.ndim != 1 or len(sizes) == 0 or sizes.min() < 0 or labels.shape != sizes.shape:
            raise ValueError("num_nodes must be numbers ≥ 0, with one label each")
        cuts = np.cumsum(sizes * (sizes + 1) // 2)
        if sizes.max() >= 1 << 31 or not 0 <= cuts[-1] <= 8 * packed.size:
            raise ValueError("triu_bits holds fewer bits than num_nodes needs")
        bits = np.unpackbits(packed)[: cuts[-1]].astype(bool)
    except (zipfile.BadZipFile, zlib.error, EOFError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error
    graphs = []
    for size, label, present in zip(sizes.tolist(), labels.tolist(), np.split(bits, cuts[:-1]), strict=True):
        pairs = np.stack(np.triu_indices(size))[:, present]  # (2, P), self-loops included
        pairs = np.concatenate([pairs, pairs[::-1, pairs[0] != pairs[1]]], axis=1)
        graphs.append(graph_class(edge_index=torch.from_numpy(pairs), y=torch.tensor([label]), num_nodes=size))
    return graphs
