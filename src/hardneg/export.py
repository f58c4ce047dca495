"""Export trained encoders to files for other programs: safetensors, TorchScript, torch.export and ONNX.

A file is written under a temporary name, loaded again and compared with the encoder on batches of several sizes, and
only then renamed. Every format carries the same metadata, as text.
"""

import copy
import inspect
import json
import logging
import os
import secrets
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hardneg
from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.export_inputs import FEATURES, IMAGES, Inputs, example_inputs, weights_of
from hardneg.extras import required

SUFFIXES = {"safetensors": ".safetensors", "torchscript": ".pt", "torch_export": ".pt2", "onnx": ".onnx"}
TOLERANCE = 1e-4  # runtimes add in different orders; a typical difference for 23 million weights
_EXTRA = "export"
_BATCH_SIZES = (1, 3)  # of the comparison; not the size that encoders are traced with
_REMEDY = "keep its forward to tensor operations of any batch size, or use format='safetensors'"
_METADATA = "hardneg.json"  # inside TorchScript and torch.export files

Program = Callable[..., Tensor]


def export(
    encoder: nn.Module,
    example: TensorLike | Mapping[str, TensorLike],
    to: str | Path,
    format: str = "safetensors",
    info: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
) -> Path:
    """Write an encoder to a file, after a check that the file computes the same features.

    The encoder is not changed: a float32 copy on the CPU, in evaluation mode, is written.

    Args:
        encoder: a module that returns features (B, features) for a batch of images (B, C, H, W), or for several tensors
            by name, such as the token ids and attention mask of a text encoder.
        example: one input of the encoder, as a batch of one: (1, C, H, W) floats, or a dict of tensors (1, …). A dict
            is passed as keyword arguments if ``encoder.forward`` has parameters of these names, otherwise as one dict.
            The batch dimension is dynamic in every format, all others have the size of the example.
        to: the file; without a suffix it gets that of the format. An existing file is replaced.
        format: ``"safetensors"`` (weights under the names of the encoder, torchvision's for a ResNet),
            ``"torchscript"``, ``"torch_export"`` or ``"onnx"`` (input ``images``, or the names of the dict; output
            ``features``).
        info: metadata to store in the file, such as the recipe or the mean and std of the pixels. The version of
            hardneg, the shape of the input and the number of features are added.
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

        A text encoder, with its inputs by name:

        >>> class MeanOfTokens(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = nn.Embedding(100, 16)
        ...     def forward(self, input_ids, attention_mask):
        ...         weights = attention_mask / attention_mask.sum(dim=1, keepdim=True)  # (B, L)
        ...         return (weights[:, :, None] * self.embedding(input_ids)).sum(dim=1)
        >>> tokens = {"input_ids": torch.tensor([[7, 42, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_info(export(MeanOfTokens(), tokens, Path(folder) / "text", "torch_export"))["shape"]
        '{"input_ids": [4], "attention_mask": [4]}'
    """
    return _export(encoder, example, Path(to), format, info or {}, tolerance)[0]


def export_run(
    run: str | Path, format: str = "safetensors", to: str | Path | None = None, *, trust: bool = False
) -> tuple[Path, float]:
    """Write the encoder of a run, with its recipe and the mean and std of its pixels as metadata.

    run: the folder · format: as for `export` · to: the file, in a folder that exists; by default ``exported.*`` in the
    run's · trust: allow an encoder or views that the folder names as ``module:callable`` · returns the file and the
    largest difference between the features of the file and of the encoder
    """
    from hardneg.training import recipe, run_folder
    from hardneg.training.saved_run import load_run

    checks.choice("format", format, tuple(SUFFIXES))
    if to is not None:
        checks.has_folder(Path(to))
    loaded = load_run(run, trust=trust, code=recipe.ENCODER_CODE)
    loaded.warn_if_unfinished()
    encoder = loaded.settings.kind.exportable(loaded.encoder, loaded.shape)
    example = loaded.settings.kind.example(loaded.shape, loaded.views)
    if example is None and encoder is loaded.encoder:
        raise ValueError(
            f"{run} trained an encoder of {loaded.settings.modality}, which no format supports: load it "
            "with hardneg.load_encoder"
        )
    file = Path(run) / "exported" if to is None else Path(to)
    if file.resolve() == (Path(run) / run_folder.ENCODER).resolve():
        raise ValueError(f"to={str(file)!r} is the run's own file, which marks it as finished: choose another name")
    info = {"recipe": recipe.dump(recipe.without_folders(loaded.settings))}
    if example is not None:
        channels = loaded.shape[0]
        info["mean"] = json.dumps(list(getattr(loaded.views, "mean", None) or [0.0] * channels))
        info["std"] = json.dumps(list(getattr(loaded.views, "std", None) or [1.0] * channels))
    return _export(encoder, example, file, format, info, TOLERANCE)


def verify(
    file: str | Path,
    encoder: nn.Module,
    example: TensorLike | Mapping[str, TensorLike],
    tolerance: float = TOLERANCE,
) -> float:
    """Load an exported file and compare it with the encoder on random batches of several sizes.

    Integer inputs are permutations of those of the example, so that they stay in the range that the encoder accepts.

    file: from `export`, with the suffix of its format · encoder, example: as for `export` · tolerance: relative to the
    largest feature or to 1 · returns the largest difference; raises `ValueError` if it is above the tolerance
    """
    file, frozen = Path(file), _frozen(encoder)
    tolerance = checks.number("tolerance", tolerance, at_least=0)
    inputs = example_inputs(frozen, example)
    return _compare(_LOADERS[_format_of(file)](file, frozen), frozen, inputs, tolerance, file)


def read_info(file: str | Path) -> dict[str, str]:
    """The metadata of an exported file; its weights and programs are not loaded."""
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"file={str(file)!r} does not exist: export an encoder first")
    match _format_of(file):
        case "safetensors":
            with required("safetensors", _EXTRA).safe_open(file, framework="pt") as opened:
                return dict(opened.metadata() or {})
        case "onnx":
            model = required("onnx", _EXTRA).load(str(file), load_external_data=False)
            return {entry.key: entry.value for entry in model.metadata_props}
    # The other two are zip archives. PyTorch's own loaders would run the file's program or unpickle parts of it.
    try:
        with zipfile.ZipFile(file) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/extra/{_METADATA}"))
            return dict(json.loads(archive.read(member)))
    except (zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise ValueError(f"{file} is not a file that hardneg exported: its metadata is missing") from error


# --- one writer and one loader for each format ---


def _write_safetensors(encoder: nn.Module, inputs: Inputs, file: Path, metadata: dict[str, str]) -> None:
    # safetensors accepts neither tensors that share memory nor strided ones.
    state = {name: tensor.clone().contiguous() for name, tensor in weights_of(encoder).state_dict().items()}
    file.touch()
    mode = file.stat().st_mode
    required("safetensors.torch", _EXTRA).save_file(state, file, metadata=metadata)
    file.chmod(mode)  # save_file replaces the file by one that only its owner can read


def _load_safetensors(file: Path, encoder: nn.Module) -> Program:
    fresh = copy.deepcopy(encoder)
    for tensor in fresh.state_dict().values():
        tensor.zero_()  # so that the comparison depends on the file alone
    weights_of(fresh).load_state_dict(required("safetensors.torch", _EXTRA).load_file(file), strict=True)
    return torch.no_grad()(fresh)


def _write_torchscript(encoder: nn.Module, inputs: Inputs, file: Path, metadata: dict[str, str]) -> None:
    _check_parameters(encoder, inputs, "torchscript")
    positional, keywords = inputs.arguments(inputs.tensors)
    with _quiet(), _explained("torchscript"), torch.no_grad():
        # Deprecated since torch 2.9, but the format that C++ and mobile programs load.
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            encoder, positional or None, example_kwarg_inputs=keywords or None, check_trace=False
        )
        torch.jit.save(traced, str(file), _extra_files={_METADATA: json.dumps(metadata)})


def _load_torchscript(file: Path, encoder: nn.Module) -> Program:
    with _quiet():
        program: Program = torch.no_grad()(torch.jit.load(str(file), map_location="cpu"))  # type: ignore[no-untyped-call]
        return program


def _write_torch_export(encoder: nn.Module, inputs: Inputs, file: Path, metadata: dict[str, str]) -> None:
    _check_parameters(encoder, inputs, "torch_export")
    positional, keywords = inputs.arguments(inputs.doubled())
    with _quiet(), _explained("torch_export"):
        program = torch.export.export(
            encoder,
            positional,
            keywords,
            dynamic_shapes=_dynamic_shapes(encoder, *inputs.arguments(inputs.dimensions())),
        )
        torch.export.save(program, str(file), extra_files={_METADATA: json.dumps(metadata)})


def _load_torch_export(file: Path, encoder: nn.Module) -> Program:
    with _quiet():
        return torch.no_grad()(torch.export.load(str(file)).module())


def _write_onnx(encoder: nn.Module, inputs: Inputs, file: Path, metadata: dict[str, str]) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        required(package, _EXTRA)
    module = encoder if inputs.passing == "tensor" else _Positional(encoder, inputs).eval()
    positional = tuple(inputs.doubled().values())
    with _quiet(), _explained("onnx"):
        program = torch.onnx.export(
            module,
            positional,
            dynamo=True,
            input_names=list(inputs.tensors),
            output_names=[FEATURES],
            dynamic_shapes=_dynamic_shapes(module, tuple(inputs.dimensions().values()), {}),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(metadata)
        program.save(str(file), external_data=False)  # one file, up to ONNX's 2 GB


class _Positional(nn.Module):
    """An encoder with its inputs by name as positional arguments, in the order of the example.

    An ONNX file has a flat list of inputs, which the exporter names in the order of the arguments.
    """

    def __init__(self, encoder: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.encoder, self.inputs = encoder, inputs

    def forward(self, *tensors: Tensor) -> Any:
        return self.inputs.call(self.encoder, dict(zip(self.inputs.tensors, tensors, strict=True)))


def _load_onnx(file: Path, encoder: nn.Module) -> Program:
    runtime = required("onnxruntime", _EXTRA)
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*positional: Any, **keywords: Tensor) -> Tensor:
        given = positional[0] if positional else keywords
        given = given if isinstance(given, Mapping) else {IMAGES: given}
        # The exporter drops inputs that the features do not depend on.
        return torch.from_numpy(session.run([FEATURES], {name: given[name].numpy() for name in names})[0])

    return run


_WRITERS: dict[str, Callable[[nn.Module, Inputs, Path, dict[str, str]], None]] = {
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


# --- shared by all formats ---


def _export(
    encoder: nn.Module, example: object, to: Path, format: str, info: Mapping[str, str], tolerance: float
) -> tuple[Path, float]:
    """Write, check and rename; returns the file and the largest difference."""
    checks.choice("format", format, tuple(SUFFIXES))
    tolerance = checks.number("tolerance", tolerance, at_least=0)
    file = _with_suffix(to, format)
    frozen = _frozen(encoder)
    inputs = example_inputs(frozen, example)
    metadata = _metadata(info, inputs, _count_features(frozen, inputs))
    file.parent.mkdir(parents=True, exist_ok=True)
    # A random name cannot be an existing link. It keeps the suffix, which torch.export requires.
    temporary = file.with_name(f".{secrets.token_hex(8)}-{file.name}")
    try:
        _WRITERS[format](frozen, inputs, temporary, metadata)
        difference = _compare(_LOADERS[format](temporary, frozen), frozen, inputs, tolerance, file)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file, difference


def _compare(program: Program, encoder: nn.Module, inputs: Inputs, tolerance: float, file: Path) -> float:
    """The largest difference between program and encoder on random batches; errors name ``file``."""
    largest = 0.0
    for batch in _BATCH_SIZES:
        tensors = inputs.random(batch)
        with torch.no_grad():
            expected = inputs.call(encoder, tensors)  # (batch, features)
        if not bool(expected.isfinite().all()):
            raise ValueError("the encoder returns NaN or inf for random inputs: it has diverged, export an earlier one")
        try:
            found = inputs.call(program, tensors)
        except Exception as error:  # each runtime raises its own types
            raise ValueError(f"{file} cannot take a batch of {batch} ({_first_line(error)}): {_REMEDY}") from error
        if found.shape != expected.shape:
            raise ValueError(f"{file} gives {tuple(found.shape)}, the encoder {tuple(expected.shape)}: {_REMEDY}")
        difference = float((found - expected).abs().max())
        allowed = tolerance * max(1.0, float(expected.abs().max()))
        if not difference <= allowed:  # also if it is NaN
            raise ValueError(
                f"{file} differs from the encoder by {difference:.2g} in a batch of {batch}, above the {allowed:.2g} "
                f"allowed: {_REMEDY}"
            )
        largest = max(largest, difference)
    return largest


def _frozen(encoder: nn.Module) -> nn.Module:
    """A float32 copy on the CPU, in evaluation mode."""
    if not isinstance(encoder, nn.Module):
        raise ValueError(f"encoder must be a torch.nn.Module, got {type(encoder).__name__}")
    uncompiled = getattr(encoder, "_orig_mod", encoder)  # the module inside torch.compile's wrapper
    return copy.deepcopy(uncompiled).cpu().float().eval().requires_grad_(False)


@torch.no_grad()
def _count_features(encoder: nn.Module, inputs: Inputs) -> int:
    output = inputs.call(encoder, inputs.tensors)
    if not isinstance(output, Tensor) or output.dim() != 2:
        given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the encoder must return (B, features), got {given} for one sample: wrap it in a module that returns the "
            "pooled or flattened features"
        )
    return output.shape[1]


def _metadata(info: Mapping[str, str], inputs: Inputs, features: int) -> dict[str, str]:
    for key, text in info.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(f"info must map text to text, got {key!r}: {text!r}: write it with str() or json.dumps")
    return {**info, "hardneg": hardneg.__version__, "shape": inputs.shape(), "features": str(features)}


def _with_suffix(file: Path, format: str) -> Path:
    suffix = SUFFIXES[format]
    if file.suffix == "":
        return file.with_name(file.name + suffix)
    if file.suffix != suffix:
        raise ValueError(f"to={str(file)!r} must end in {suffix} for format={format!r}, or have no suffix")
    return file


def _format_of(file: Path) -> str:
    for format, suffix in SUFFIXES.items():
        if file.suffix == suffix:
            return format
    raise ValueError(f"file={str(file)!r} must end in one of {', '.join(SUFFIXES.values())}")


def _check_parameters(encoder: nn.Module, inputs: Inputs, format: str) -> None:
    """Raise if inputs are passed through ``**kwargs``, which TorchScript and dynamic shapes of torch.export lack."""
    if inputs.passing == "keywords":
        named = inspect.signature(encoder.forward).parameters
        unnamed = [name for name in inputs.tensors if name not in named]
        if unnamed:
            raise ValueError(
                f"encoder.forward takes {', '.join(unnamed)} through **kwargs, which format={format!r} cannot hold: "
                "name the inputs as parameters, or use format='onnx' or 'safetensors'"
            )


def _dynamic_shapes(module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The ``dynamic_shapes`` of torch.export, from the dynamic dimensions of each argument."""
    return dict(inspect.signature(module.forward).bind(*positional, **keywords).arguments)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress deprecation warnings of torch, and warnings of its ONNX exporter that no user can act on."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            # The file is compared with the encoder afterwards.
            warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)
            warnings.filterwarnings("ignore", message=r".*axis name: \w+ will not be used")  # one name for all inputs
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(format: str) -> Iterator[None]:
    """Raise a ValueError that names the format and a remedy if tracing fails."""
    try:
        yield
    except ImportError as error:  # newer versions of torch need newer versions of onnxscript
        raise ImportError(f'this format needs newer packages ({error}): pip install -U "hardneg[export]"') from error
    except Exception as error:  # of any type, from the user's forward
        raise ValueError(
            f"the encoder cannot be written as format={format!r} ({_first_line(error)}): {_REMEDY}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
