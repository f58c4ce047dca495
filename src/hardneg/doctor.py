"""Check the installation: versions, extras, devices, compilers, data sets and disk space.

Optional packages are not imported: versions are read from package metadata, and data sets are recognized by their
headers. No check raises; an error in a check is reported as a finding.
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

# For users; dev, docs and all are for development.
EXTRAS = ("train", "data", "export", "text", "graph", "mine", "cluster")
# Import names that differ from the package name.
MODULES = {"faiss-cpu": "faiss", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
SPACE = 5 * 2**30  # bytes: two checkpoints of a ResNet-50 with Adam, a report, and some reserve
_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_MAX_FILES = 10_000  # of a folder are counted, so that ImageNet does not take minutes


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    name: of the check · status: ``"ok"``, ``"missing"`` (optional, can be installed), ``"warning"`` (works with
    limitations) or ``"broken"`` · detail: what was found · fix: what to do, empty if nothing is needed

    Examples:
        >>> Finding("cuda", "missing", "no GPU")
        Finding(name='cuda', status='missing', detail='no GPU', fix='')
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Run all checks; never raises.

    Examples:
        >>> {finding.name: finding.status for finding in examine()}["torch"]
        'ok'
    """
    all_checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "core": _core,
        "extras": _extras,
        "cpu": _cpu,
        "accelerators": _accelerators,
        "torch.compile": _compile,
        "data": _data,
        "disk": _disk,
    }
    found: list[Finding] = []
    for name, check in all_checks.items():
        try:
            found.extend(check())
        except Exception as error:  # the other checks are still useful
            fix = "report this with the versions above"
            found.append(Finding(name, "broken", f"the check failed: {type(error).__name__}: {error}", fix))
    return found


# --- software ---


def _core() -> Iterator[Finding]:
    import hardneg

    yield Finding("python", "ok", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("hardneg", "ok", f"{hardneg.__version__}, {Path(hardneg.__file__).parent}")
    yield Finding("torch", "ok", torch.__version__)
    yield Finding("numpy", "ok", np.__version__)


def _extras() -> Iterator[Finding]:
    """Every package of every extra, as declared in the metadata of the installed hardneg."""
    try:
        declared = importlib.metadata.requires("hardneg") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "extras", "warning", "hardneg is imported from a folder and is not installed", 'pip install -e ".[train]"'
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
    """Version as numbers without trailing zeros: 2.13.0+cpu is (2, 13)."""
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
        yield Finding("cpu", "warning", detail, f"set OMP_NUM_THREADS={cores}: more threads than cores are slower")
    else:
        yield Finding("cpu", "ok", detail)


def _accelerators() -> Iterator[Finding]:
    found = False
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = True
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, {_bytes(free)} free of {_bytes(total)}"
            if free < 0.2 * total:
                yield Finding(f"cuda:{index}", "warning", detail, "another process uses its memory: see nvidia-smi")
            else:
                yield Finding(f"cuda:{index}", "ok", detail)
    elif shutil.which("nvidia-smi"):
        found = True
        if torch.version.cuda is None:
            detail = "nvidia-smi is installed, but this torch is built without CUDA"
            yield Finding("cuda", "warning", detail, "install the CUDA build of torch: pytorch.org/get-started")
        else:
            detail = f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU"
            yield Finding(
                "cuda", "warning", detail, f"update the driver for CUDA {torch.version.cuda}, or free the GPU"
            )
    if torch.backends.mps.is_available():
        found = True
        yield Finding("mps", "ok", f"Apple GPU, {_bytes(torch.mps.recommended_max_memory())} recommended at most")
    if not found:
        yield Finding("gpu", "missing", "none: training runs on the CPU, which is sufficient for digits-simclr")


def _compile() -> Iterator[Finding]:
    """Whether trainer.compile works: on a CPU it needs a C++ compiler and the headers of Python, on a GPU Triton."""
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
            "torch.compile",
            "missing",
            detail,
            f"install g++ or clang++, or set {variable}; until then do not set trainer.compile",
        )
    elif not headers.exists():
        yield Finding("torch.compile", "missing", f"{headers} does not exist", "install python3-dev or python3-devel")
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
    found = [finding for entry in entries if (finding := _data_set(entry)) is not None]
    yield from found
    if not found:
        where = " or ".join(str(folder) for folder in folders)
        fix = "hardneg data NAME writes a published set; for your own, set data.source= to its path"
        yield Finding("data", "missing", f"no data set in {where}", fix)


def _digits() -> tuple[str, str, str]:
    if importlib.util.find_spec("sklearn") is None:
        return "missing", "comes with scikit-learn", 'pip install "hardneg[train]"'
    return "ok", "1,797 images of 1x8x8, with scikit-learn", ""


def _data_set(entry: Path) -> Finding | None:
    name = f"data: {entry}"
    try:
        detail = _npz(entry) if entry.suffix == ".npz" else _folder(entry) if entry.is_dir() else _file(entry)
    except Exception as error:  # a truncated file can raise anything
        return Finding(name, "broken", f"cannot be read: {type(error).__name__}: {error}", "download or write it again")
    return None if detail is None else Finding(name, "ok", detail)


def _npz(file: Path) -> str | None:
    """The splits and shapes of its images, read from the headers of the arrays; None if it has no images."""
    found = []
    with zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            key = member.removesuffix(".npy")
            if key == "images" or key.endswith("_images"):
                with archive.open(member) as opened:
                    version = np.lib.format.read_magic(opened)
                    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                    shape = (read or np.lib.format.read_array_header_2_0)(opened)[0]
                split = key.removesuffix("images").rstrip("_") or "all"
                found.append(f"{split} {shape[0]:,} of {'x'.join(map(str, shape[1:]))}")
    return f".npz of images: {', '.join(found)}" if found else None


def _folder(folder: Path) -> str | None:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return "dataset saved by datasets"
    images, tables, files = 0, 0, 0
    for _, _, names in os.walk(folder):
        for name in islice(names, _MAX_FILES - files):
            files += 1
            images += name.lower().endswith(_IMAGE_SUFFIXES)
            tables += name.endswith((".parquet", ".arrow"))
        if files >= _MAX_FILES:
            break
    more = " or more" if files >= _MAX_FILES else ""
    if tables:
        return f"{tables}{more} parquet or arrow files"
    if images:
        return f"folder of {images:,}{more} images"
    return f"folder of {files:,}{more} files without images"


def _file(file: Path) -> str | None:
    return f"{file.suffix[1:]} file of {_bytes(file.stat().st_size)}" if file.suffix in (".parquet", ".arrow") else None


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        yield Finding("disk", "broken", f"{here} is not writable", "change to a writable folder, or pass --run")
    elif free < SPACE:
        detail = f"{_bytes(free)} free in {here}"
        yield Finding("disk", "warning", detail, f"free some space: a run of a ResNet-50 may need {_bytes(SPACE)}")
    else:
        yield Finding("disk", "ok", f"{_bytes(free)} free in {here}")


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("bytes", "KiB") else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
