"""Trained encoders as files that other programs read: safetensors, TorchScript, torch.export and ONNX.

A file is written beside its place, loaded afresh, compared with the encoder on batches of other sizes, and only then
put in its place: what is there works. Every format carries the same notes, as text.
"""

import copy
import json
import logging
import os
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import hardneg
from hardneg import checks, randomness

SUFFIXES = {"safetensors": ".safetensors", "torchscript": ".pt", "torch_export": ".pt2", "onnx": ".onnx"}
TOLERANCE = 1e-4  # other programs add in another order; of 23 million weights this is the usual trace
_BATCHES = (1, 3)  # neither is the size that the exporters are shown
_REMEDY = "keep its forward to tensor operations of any batch, or use format='safetensors'"
_NOTES = "hardneg.json"  # inside TorchScript and torch.export files

Program = Callable[[Tensor], Tensor]


def export(
    encoder: nn.Module,
    example: Tensor,
    to: str | Path,
    format: str = "safetensors",
    info: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
) -> Path:
    """Write an encoder to a file, and check the file before it takes its place.

    The encoder itself stays as it is: a float32 copy on the CPU, in evaluation mode, is written.

    Args:
        encoder: (B, C, H, W) → (B, features).
        example: (1, C, H, W) floats, a picture as the encoder is to see it; the batch stays free in every format.
        to: the file; without a suffix it gets that of the format. A file that is there is replaced.
        format: ``"safetensors"`` (weights under the encoder's own names, for a ResNet torchvision's),
            ``"torchscript"``, ``"torch_export"`` or ``"onnx"`` (input ``images``, output ``features``).
        info: notes to keep in the file: the recipe, mean and std of the pixels. Version, shape and features are added.
        tolerance: largest difference allowed, relative to the largest feature or to 1.

    Returns:
        The file.

    Examples:
        >>> import tempfile
        >>> from hardneg.images.encoders import Tiny
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = export(Tiny(channels=1, size=8), torch.zeros(1, 1, 8, 8), Path(folder) / "digits")
        ...     file.name, read_info(file)["features"]
        ('digits.safetensors', '128')
    """
    return _written(encoder, example, Path(to), format, info or {}, tolerance)[0]


def export_run(
    run: str | Path, format: str = "safetensors", to: str | Path | None = None, *, trust: bool = False
) -> tuple[Path, float]:
    """Write the encoder of a run, with its recipe and the mean and std of its pixels among the notes.

    run: the folder · format: as for `export` · to: the file, by default ``exported.*`` in the folder · trust: allow an
    encoder that the folder names as ``module:callable`` · returns the file and the largest difference that was found
    when it was checked
    """
    from hardneg.training import recipe, run_folder
    from hardneg.training.saved_run import load_run

    checks.choice("format", format, tuple(SUFFIXES))
    loaded = load_run(run, trust=trust)
    if loaded.prepare is None:
        raise ValueError(f"{run} trained a graph encoder, which no format here can hold: use its encoder.safetensors")
    file = Path(run) / "exported" if to is None else Path(to)
    if file.resolve() == (Path(run) / run_folder.ENCODER).resolve():
        raise ValueError(f"to={str(file)!r} is the run's own file, which says that it is finished: choose another name")
    channels = loaded.shape[0]
    info = {
        "recipe": recipe.dump(loaded.settings),
        "mean": json.dumps(list(getattr(loaded.views, "mean", None) or [0.0] * channels)),
        "std": json.dumps(list(getattr(loaded.views, "std", None) or [1.0] * channels)),
    }
    example = loaded.prepare(torch.zeros(1, *loaded.shape, dtype=torch.uint8))
    return _written(loaded.encoder, example, file, format, info, TOLERANCE)


def verify(file: str | Path, encoder: nn.Module, example: Tensor, tolerance: float = TOLERANCE) -> float:
    """Load an exported file afresh and compare it with the encoder on random batches of several sizes.

    file: as `export` wrote it; its suffix tells the format · encoder, example: as for `export` · tolerance: relative to
    the largest feature or to 1 · returns the largest difference; raises `ValueError` if it is above the tolerance
    """
    file, frozen = Path(file), _frozen(encoder)
    checks.number("tolerance", tolerance, at_least=0)
    return _compare(_LOADERS[_format_of(file)](file, frozen), frozen, _checked_example(example), tolerance, file)


def read_info(file: str | Path) -> dict[str, str]:
    """The notes in an exported file; its weights and programs are not loaded."""
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"file={str(file)!r} does not exist: export an encoder first")
    match _format_of(file):
        case "safetensors":
            with _required("safetensors").safe_open(file, framework="pt") as opened:
                return dict(opened.metadata() or {})
        case "onnx":
            model = _required("onnx").load(str(file), load_external_data=False)
            return {note.key: note.value for note in model.metadata_props}
    # The other two are zip archives. PyTorch's own loaders would run the file's program or unpickle parts of it.
    try:
        with zipfile.ZipFile(file) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/extra/{_NOTES}"))
            return dict(json.loads(archive.read(member)))
    except (zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise ValueError(f"{file} is no file that hardneg exported: its notes are missing") from error


# --- one writer and one loader for each format ---


def _write_safetensors(encoder: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    # Clones, because weights that share memory are refused, and contiguous, because strided ones are.
    state = {name: tensor.clone().contiguous() for name, tensor in encoder.state_dict().items()}
    _required("safetensors.torch").save_file(state, file, metadata=notes)


def _load_safetensors(file: Path, encoder: nn.Module) -> Program:
    fresh = copy.deepcopy(encoder)
    for tensor in fresh.state_dict().values():
        tensor.zero_()  # so that only the file can have put them there
    fresh.load_state_dict(_required("safetensors.torch").load_file(file), strict=True)
    return torch.no_grad()(fresh)


def _write_torchscript(encoder: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    with _quiet(), torch.no_grad():
        # Deprecated since torch 2.9, and still what C++ and mobile programs load.
        traced = torch.jit.trace(encoder, example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(file), _extra_files={_NOTES: json.dumps(notes)})


def _load_torchscript(file: Path, encoder: nn.Module) -> Program:
    with _quiet():
        program: Program = torch.no_grad()(torch.jit.load(str(file), map_location="cpu"))  # type: ignore[no-untyped-call]
        return program


def _write_torch_export(encoder: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    with _quiet(), _explained("torch_export"):
        program = torch.export.export(encoder, (_pair(example),), dynamic_shapes=_free_batch())
        torch.export.save(program, str(file), extra_files={_NOTES: json.dumps(notes)})


def _load_torch_export(file: Path, encoder: nn.Module) -> Program:
    with _quiet():
        return torch.no_grad()(torch.export.load(str(file)).module())


def _write_onnx(encoder: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    for module in ("onnx", "onnxscript", "onnxruntime"):
        _required(module)
    with _quiet(), _explained("onnx"):
        program = torch.onnx.export(
            encoder,
            (_pair(example),),
            dynamo=True,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=_free_batch(),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(notes)
        program.save(str(file), external_data=False)  # one file, up to ONNX's 2 GB


def _load_onnx(file: Path, encoder: nn.Module) -> Program:
    runtime = _required("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["features"], {"images": images.numpy()})[0])


_WRITERS: dict[str, Callable[[nn.Module, Tensor, Path, dict[str, str]], None]] = {
    "safetensors": _write_safetensors,
    "torchscript": _write_torchscript,
    "torch_export": _write_torch_export,
    "onnx": _write_onnx,
}
_LOADERS: dict[str, Callable[[Path, nn.Module], Program]] = {
    "safetensors": _load_safetensors,
    "torchscript": _load_torchscript,
    "torch_export": _load_torch_export,
    "onnx": _load_onnx,
}


# --- what they share ---


def _written(
    encoder: nn.Module, example: Tensor, to: Path, format: str, info: Mapping[str, str], tolerance: float
) -> tuple[Path, float]:
    checks.choice("format", format, tuple(SUFFIXES))
    checks.number("tolerance", tolerance, at_least=0)
    file = _place(to, format)
    frozen = _frozen(encoder)
    features = _features(frozen, _checked_example(example))
    notes = _notes(info, example, features)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not to be guessed, so that no link waits there; it keeps the suffix, which torch.export insists on.
    fresh = file.with_name(f".{secrets.token_hex(8)}-{file.name}")
    try:
        _WRITERS[format](frozen, example.float().cpu(), fresh, notes)
        difference = _compare(_LOADERS[format](fresh, frozen), frozen, example, tolerance, file)
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
    return file, difference


def _compare(program: Program, encoder: nn.Module, example: Tensor, tolerance: float, file: Path) -> float:
    """The largest difference between the two on random batches; ``file`` is named where it is too large."""
    largest = 0.0
    for batch in _BATCHES:
        images = torch.randn(batch, *example.shape[1:], generator=randomness.generator("cpu", batch))
        with torch.no_grad():
            wanted = encoder(images)  # (batch, features)
        if not bool(wanted.isfinite().all()):
            raise ValueError("the encoder gives NaN or inf on random pictures: it has diverged, export an earlier one")
        try:
            given = program(images)
        except Exception as error:  # each runtime has its own kinds
            raise ValueError(f"{file} cannot take a batch of {batch} ({_first_line(error)}): {_REMEDY}") from error
        if given.shape != wanted.shape:
            raise ValueError(f"{file} gives {tuple(given.shape)}, the encoder {tuple(wanted.shape)}: {_REMEDY}")
        difference = float((given - wanted).abs().max())
        allowed = tolerance * max(1.0, float(wanted.abs().max()))
        if not difference <= allowed:  # NaN is not
            raise ValueError(
                f"{file} differs from the encoder by {difference:.2g} in a batch of {batch}, above the {allowed:.2g} "
                f"allowed: {_REMEDY}"
            )
        largest = max(largest, difference)
    return largest


def _frozen(encoder: nn.Module) -> nn.Module:
    if not isinstance(encoder, nn.Module):
        raise ValueError(f"encoder must be a torch.nn.Module, got {type(encoder).__name__}")
    plain = getattr(encoder, "_orig_mod", encoder)  # what torch.compile wraps; a copy of it is not compiled
    return copy.deepcopy(plain).cpu().float().eval().requires_grad_(False)


def _checked_example(example: Tensor) -> Tensor:
    checks.floating("example", example)
    if example.dim() < 2 or len(example) != 1 or example.numel() == 0:
        raise ValueError(f"example must be one picture (1, C, H, W), got {tuple(example.shape)}: use images[:1]")
    return example


@torch.no_grad()
def _features(encoder: nn.Module, example: Tensor) -> int:
    output = encoder(example.float().cpu())
    if not isinstance(output, Tensor) or output.dim() != 2:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"the encoder must return (B, features), got {given} for one picture: pool or flatten it")
    return output.shape[1]


def _notes(info: Mapping[str, str], example: Tensor, features: int) -> dict[str, str]:
    for key, text in info.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"info must map text to text, got {key!r}: {text!r}: write it with str() or json.dumps")
    shape = ",".join(str(side) for side in example.shape[1:])
    return {**info, "hardneg": hardneg.__version__, "shape": shape, "features": str(features)}


def _place(file: Path, format: str) -> Path:
    suffix = SUFFIXES[format]
    if file.suffix == "":
        return file.with_name(file.name + suffix)
    if file.suffix != suffix:
        raise ValueError(f"to={str(file)!r} must end in {suffix} for format={format!r}, or leave the suffix out")
    return file


def _format_of(file: Path) -> str:
    for format, suffix in SUFFIXES.items():
        if file.suffix == suffix:
            return format
    raise ValueError(f"file={str(file)!r} must end in one of {', '.join(SUFFIXES.values())}")


def _pair(example: Tensor) -> Tensor:
    return example.repeat(2, *([1] * (example.dim() - 1)))  # the tracer takes a batch of one for a constant


def _free_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch")},)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notes on its own future, and on torchvision's operators, which no encoder here uses."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(format: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # torch asks more of onnxscript with each version
        raise ImportError(f'this format needs newer packages ({error}): pip install -U "hardneg[export]"') from error
    except Exception as error:  # whatever the tracer meets in the user's forward
        raise ValueError(
            f"the encoder cannot be written as format={format!r} ({_first_line(error)}): {_REMEDY}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _required(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'this format needs {package} ({error}): pip install "hardneg[export]"') from error
