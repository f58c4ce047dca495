"""What this machine has and lacks, as data: versions, extras, devices, compilers, data sets, space on the disk.

Nothing heavy is imported: versions come from the packages' own notes, and data sets are told by their headers. No
finding raises; what goes wrong while looking is a finding too.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

EXTRAS = ("train", "data", "export", "text", "graph", "mine")  # what users install; dev, docs and all are ours
# Where the name to import is not the name to install.
MODULES = {"faiss-cpu": "faiss", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
SPACE = 5 * 2**30  # bytes: two checkpoints of a ResNet-50 with Adam, a report, and air
_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_COUNTED = 10_000  # files looked at in a folder, so that ImageNet does not take minutes


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    name: what · status: ``"ok"``, ``"missing"`` (can be added), ``"warning"`` (works, but look) or ``"broken"`` ·
    detail: what was found · fix: what to do about it, empty where nothing is to be done

    Examples:
        >>> Finding("cuda", "missing", "no GPU")
        Finding(name='cuda', status='missing', detail='no GPU', fix='')
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at everything, in the order in which a user would ask; never raises.

    Examples:
        >>> {finding.name: finding.status for finding in examine()}["torch"]
        'ok'
    """
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "core": _core,
        "extras": _extras,
        "cpu": _cpu,
        "accelerators": _accelerators,
        "torch.compile": _compile,
        "data": _data,
        "disk": _disk,
    }
    found: list[Finding] = []
    for name, look in looks.items():
        try:
            found.extend(look())
        except Exception as error:  # a doctor who faints helps nobody
            fix = "report this with the versions above"
            found.append(Finding(name, "broken", f"could not be examined: {type(error).__name__}: {error}", fix))
    return found


# --- software ---


def _core() -> Iterator[Finding]:
    import hardneg

    yield Finding("python", "ok", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("hardneg", "ok", f"{hardneg.__version__}, {Path(hardneg.__file__).parent}")
    yield Finding("torch", "ok", torch.__version__)
    yield Finding("numpy", "ok", np.__version__)


def _extras() -> Iterator[Finding]:
    """Every package of every extra, as the installed hardneg itself declares them."""
    try:
        declared = importlib.metadata.requires("hardneg") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "extras", "warning", "hardneg runs from a folder that is not installed", 'pip install -e ".[train]"'
        )
        return
    for extra in EXTRAS:
        for line in declared:
            parts = re.match(
                r"([A-Za-z0-9._-]+)(?:\[.*?\])?\s*(?:\(?>=\s*([0-9.]+)\)?)?.*;.*extra\s*==\s*.(\w+).", line
            )
            if parts is not None and parts[3] == extra:
                yield _package(extra, parts[1], parts[2] or "0")


def _package(extra: str, package: str, at_least: str) -> Finding:
    name, install = f"{extra}: {package}", f'pip install "hardneg[{extra}]"'
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", install)
    module = MODULES.get(package.lower(), package.replace("-", "_"))
    if importlib.util.find_spec(module) is None:
        fix = f"pip install --force-reinstall {package}"
        return Finding(name, "broken", f"{version} is installed, but cannot be imported as {module}", fix)
    if _numbers(version) < _numbers(at_least):
        return Finding(name, "broken", f"{version}, but {at_least} or later is needed", f"{install} --upgrade")
    return Finding(name, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13): trailing zeros say nothing."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# --- devices ---


def _cpu() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    detail = f"{cores} cores for this process, {threads} threads of torch"
    if threads > cores:
        yield Finding("cpu", "warning", detail, f"set OMP_NUM_THREADS={cores}: more threads than cores slow each other")
    else:
        yield Finding("cpu", "ok", detail)


def _accelerators() -> Iterator[Finding]:
    seen = False
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            seen = True
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, {_bytes(free)} free of {_bytes(total)}"
            if free < 0.2 * total:
                yield Finding(f"cuda:{index}", "warning", detail, "another process holds its memory: see nvidia-smi")
            else:
                yield Finding(f"cuda:{index}", "ok", detail)
    elif shutil.which("nvidia-smi"):
        seen = True
        if torch.version.cuda is None:
            detail = "nvidia-smi is here, but this torch is built without CUDA"
            yield Finding("cuda", "warning", detail, "install the CUDA build of torch: pytorch.org/get-started")
        else:
            detail = f"nvidia-smi is here, but torch {torch.__version__} finds no GPU"
            yield Finding(
                "cuda", "warning", detail, f"update the driver for CUDA {torch.version.cuda}, or free the GPU"
            )
    if torch.backends.mps.is_available():
        seen = True
        yield Finding("mps", "ok", f"Apple GPU, {_bytes(torch.mps.recommended_max_memory())} recommended at most")
    if not seen:
        yield Finding("gpu", "missing", "none: training runs on the CPU, which is enough for digits-simclr")


def _compile() -> Iterator[Finding]:
    """Whether trainer.compile can work: on a CPU it needs a C++ compiler and Python's headers, on a GPU Triton."""
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            yield Finding("torch.compile", "missing", "on a GPU it needs triton", "pip install triton")
            return
        variable, names = "CC", ["cc", "gcc", "clang"]
    else:
        variable, names = "CXX", ["c++", "g++", "clang++", "cl"]
    chosen = os.environ.get(variable, "")
    compiler = next((path for name in ([chosen] if chosen else names) if (path := shutil.which(name))), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None:
        detail = f"{variable}={chosen} is not found" if chosen else "no compiler is found"
        yield Finding(
            "torch.compile", "missing", detail, f"install g++ or clang++, or set {variable}; until then leave"
        )
    elif not headers.exists():
        yield Finding("torch.compile", "missing", f"{headers} is not there", "install python3-dev or python3-devel")
    else:
        yield Finding("torch.compile", "ok", compiler)


# --- data and disk ---


def _data() -> Iterator[Finding]:
    yield Finding("data: digits", *_digits())
    named = os.environ.get("HARDNEG_DATA", "")
    folders = [Path("data")]
    if named and not Path(named).is_dir():
        yield Finding("$HARDNEG_DATA", "broken", f"{named} is not a folder", "correct or unset HARDNEG_DATA")
    elif named and Path(named).resolve() != folders[0].resolve():
        folders.append(Path(named))
    entries = [entry for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir())]
    found = [finding for entry in entries if (finding := _guarded(entry)) is not None]
    yield from found
    if not found:
        where = " or ".join(str(folder) for folder in folders)
        fix = "put an .npz, a folder of pictures or parquet there, or name any other place with data.source="
        yield Finding("data", "missing", f"no data set in {where}", fix)


def _digits() -> tuple[str, str, str]:
    if importlib.util.find_spec("sklearn") is None:
        return "missing", "comes with scikit-learn", 'pip install "hardneg[train]"'
    return "ok", "1,797 pictures of 1x8x8, with scikit-learn", ""


def _guarded(entry: Path) -> Finding | None:
    name = f"data: {entry}"
    try:
        detail = _npz(entry) if entry.suffix == ".npz" else _folder(entry) if entry.is_dir() else _file(entry)
    except Exception as error:  # a file cut short can break any reader
        return Finding(name, "broken", f"cannot be read: {type(error).__name__}: {error}", "download or write it again")
    if detail is None:
        return None
    fix = "python scripts/unpack_data.py SOURCE data, or make data" if detail.startswith("packed") else ""
    return Finding(name, "warning" if fix else "ok", detail, fix)


def _npz(file: Path) -> str | None:
    """What the arrays in it are, from their headers."""
    found = []
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            key = member.removesuffix(".npy")
            if key == "blob":
                return "packed pictures"
            if key == "images" or key.endswith("_images"):
                with archive.open(member) as opened:
                    version = np.lib.format.read_magic(opened)
                    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                    shape = (read or np.lib.format.read_array_header_2_0)(opened)[0]
                split = key.removesuffix("images").rstrip("_") or "all"
                found.append(f"{split} {shape[0]:,} of {'x'.join(map(str, shape[1:]))}")
    return f".npz of pictures: {', '.join(found)}" if found else None


def _folder(folder: Path) -> str | None:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return "dataset saved by datasets"
    pictures, tables, packed, seen = 0, 0, False, 0
    for _, _, names in os.walk(folder):
        for name in islice(names, _COUNTED - seen):
            seen += 1
            pictures += name.lower().endswith(_PICTURES)
            tables += name.endswith((".parquet", ".arrow"))
            packed = packed or name.endswith(".npz")
        if seen >= _COUNTED:
            break
    more = " or more" if seen >= _COUNTED else ""
    if tables:
        return f"{tables}{more} parquet or arrow files"
    if pictures:
        return f"folder of {pictures:,}{more} pictures"
    inside = sorted(folder.glob("*.npz")) if packed else []
    return (_npz(inside[0]) if inside else None) or f"folder of {seen:,}{more} files, none a picture"


def _file(file: Path) -> str | None:
    return f"{file.suffix[1:]} file of {_bytes(file.stat().st_size)}" if file.suffix in (".parquet", ".arrow") else None


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        yield Finding("disk", "broken", f"{here} cannot be written", "change to a folder of your own, or pass --run")
    elif free < SPACE:
        detail = f"{_bytes(free)} free in {here}"
        yield Finding("disk", "warning", detail, f"free some: a run of a ResNet-50 may need {_bytes(SPACE)}")
    else:
        yield Finding("disk", "ok", f"{_bytes(free)} free in {here}")


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("bytes", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
