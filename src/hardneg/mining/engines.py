"""The blocks of a job, which run in this process or on a cluster; finished blocks may be kept on disk."""

import io
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.mining.blocks import Block, Job
from hardneg.mining.files import replaced
from hardneg.mining.selection import Dropped
from hardneg.mining.tasks import has_gpus, run


def run_blocks(job: Job, engine: str, folder: Path | None = None) -> list[Block]:
    """All blocks of a job, in order. folder: of finished blocks, which are read instead of computed again"""
    numbers = range(len(job.blocks()))
    files = [None if folder is None else folder / f"block-{number:06}.npz" for number in numbers]
    missing = [number for number, file in zip(numbers, files, strict=True) if file is None or not file.exists()]
    fresh: dict[int, Block] = {}
    if engine == "ray":
        job = replace(job, device="cuda" if has_gpus() else "cpu")  # of the workers, not of this process
    for place, block in run(engine, _block, job, missing, "mining"):
        number, file = missing[place], files[missing[place]]
        if file is None:
            fresh[number] = block
        else:
            _write(block, file)
    return [fresh[number] if file is None else _read(file) for number, file in enumerate(files)]


def _block(job: Job, number: int) -> Block:
    return job.run(number)


def _write(block: Block, file: Path) -> None:
    arrays = {field.name: getattr(block, field.name) for field in fields(block) if field.name != "dropped"}
    arrays |= {f"dropped_{field.name}": getattr(block.dropped, field.name) for field in fields(block.dropped)}
    with replaced(file) as out:
        content = io.BytesIO()
        np.savez(content, **{name: array.numpy() for name, array in arrays.items()})
        out.write(content.getbuffer())


def _read(file: Path) -> Block:
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays: dict[str, Tensor] = {name: torch.from_numpy(found[name]) for name in found.files}
    except Exception as error:  # bytes that are not an archive raise nearly anything
        raise ValueError(f"{file} cannot be read ({error}): remove it, and start again") from error
    dropped: Any = {
        name.removeprefix("dropped_"): arrays.pop(name) for name in [*arrays] if name.startswith("dropped_")
    }
    return Block(**arrays, dropped=Dropped(**dropped))
