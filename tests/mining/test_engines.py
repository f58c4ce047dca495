"""Engines: finished blocks on disk, and a Ray cluster with two workers gives the result of one process."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import children
import numpy as np
import pyarrow.parquet
import pytest
import torch

import hardneg as hn
from hardneg.mining import engines
from hardneg.mining.blocks import Block, Job
from hardneg.mining.memory import checked_memory
from hardneg.mining.negatives import make_job
from hardneg.mining.rules import checked_rules
from hardneg.mining.vectors import open_vectors

DRAW = np.random.default_rng(0)
CORPUS = DRAW.standard_normal((3000, 32)).astype(np.float32)
QUERIES = CORPUS[:600] + 0.8 * DRAW.standard_normal((600, 32)).astype(np.float32)


def job(memory: int = 200_000) -> Job:
    rules = checked_rules(4, hn.BelowPositive(relative=0.95), (0, None), None, False, 0)
    given = open_vectors("queries", QUERIES), open_vectors("corpus", CORPUS)
    pairs = np.stack([np.arange(600), (np.arange(600) + 1) % 3000])  # of a query and a document that are no negatives
    return make_job(*given, np.arange(600), None, rules, memory, pairs=pairs)


def assert_equal(one: Block, other: Block) -> None:
    for name in ("indices", "scores", "positive_scores", "counts"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name in ("query", "document", "score", "rule"):
        assert torch.equal(getattr(one.dropped, name), getattr(other.dropped, name))


def test_a_block_on_disk_is_read_as_it_was_written(tmp_path: Path) -> None:
    work = job()
    assert len(work.blocks()) > 5
    expected = engines.run_blocks(work, "local")
    written = engines.run_blocks(work, "local", tmp_path)
    (tmp_path / "block-000002.npz").unlink()
    again = engines.run_blocks(work, "local", tmp_path)
    for one, two, three in zip(expected, written, again, strict=True):
        assert_equal(one, two)
        assert_equal(one, three)


def test_a_broken_block_is_named(tmp_path: Path) -> None:
    engines.run_blocks(job(), "local", tmp_path)
    (tmp_path / "block-000001.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"block-000001\.npz cannot be read"):
        engines.run_blocks(job(), "local", tmp_path)


def test_ray_without_a_cluster_says_so() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="needs a cluster"):
        hn.mine(QUERIES, CORPUS, np.arange(600), engine="ray")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of this machine with two workers."""
    ray = pytest.importorskip("ray")
    source = Path(hn.__file__).parents[1]
    monkeypatch.setenv("KILLED", str(tmp_path))
    passed = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "KILLED": str(tmp_path)}
    options: dict[str, Any] = {"env_vars": passed}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=options, object_store_memory=10**8)
    yield ray
    ray.shutdown()


class LosingJob(Job):
    """A job whose block 3 kills its own process the first time it runs."""

    def run(self, number: int) -> Block:
        marker = Path(os.environ["KILLED"], "killed")
        found = super().run(number)
        if number == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_gives_the_result_of_one_process(cluster: Any, tmp_path: Path) -> None:
    cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    work = job()
    expected = engines.run_blocks(work, "local")
    losing = LosingJob(**{field.name: getattr(work, field.name) for field in fields(work)})
    found = engines.run_blocks(losing, "ray")
    assert (tmp_path / "killed").exists()
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.slow
def test_the_engine_ray_gives_the_result_of_one_process(cluster: Any) -> None:
    options: dict[str, Any] = {"num_negatives": 4, "memory": 200_000, "sample": True, "rank_range": (0, 50)}
    expected = hn.mine(QUERIES, CORPUS, np.arange(600), **options)
    found = hn.mine(QUERIES, CORPUS, np.arange(600), engine="ray", **options)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.scores, expected.scores)
    assert found.dropped == expected.dropped


class Letters(torch.nn.Module):
    """Counts letters; the process that embeds a given text for the first time is killed."""

    def __init__(self, fatal: str) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(26, 12, generator=torch.Generator().manual_seed(0)))
        self.fatal = fatal

    def forward(self, texts: list[str]) -> torch.Tensor:
        marker = Path(os.environ["KILLED"], "killed")
        if self.fatal in texts and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        counts = [[float(text.count(chr(97 + letter))) for letter in range(26)] for text in texts]
        found: torch.Tensor = torch.tensor(counts) @ self.weights
        return found


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_a_cluster_embeds_texts_as_one_process_does(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr("hardneg.mining.embedding._CHUNK", 40)
    draw = np.random.default_rng(2)
    texts = ["".join(draw.choice([*"abcdefghijklmnopqrstuvwxyz"], 20)) for _ in range(300)]
    given: dict[str, Any] = {"queries": texts[:100], "corpus": texts, "positives": [[i] for i in range(100)]}
    given |= {"hardening": hn.Uniform(), "num_negatives": 5}
    expected = hn.mine(**given, model=Letters(""))
    cache = tmp_path / "cache" if cached else None
    found = hn.mine(**given, model=Letters(texts[130]), engine="ray", cache=cache)
    assert (tmp_path / "killed").exists()
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.scores, expected.scores)
    if cache is not None:
        assert len([*cache.glob("*.npy")]) == 3 + 8
        again = hn.mine(**given, model=Letters(texts[130]), cache=cache)
        assert torch.equal(again.scores, expected.scores)


PEAK = """
import sys, numpy as np, hardneg as hn
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
queries, positives = np.load(sys.argv[1] + "/queries.npy"), np.arange(400)
# The buffers of the matrix products are made in the first call, which also imports what reads the files.
hn.mine(queries, sys.argv[1] + "/small", positives, memory="24MiB", num_negatives=3)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
hn.mine(queries, sys.argv[1] + "/corpus", positives, memory="24MiB", num_negatives=3)
print(status("VmHWM") - before)
"""


BLAS_BUFFER = 32 << 20  # bytes that OpenBLAS maps at once


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_a_corpus_four_times_the_budget_is_mined_within_it(kind: str, tmp_path: Path) -> None:
    """A corpus of 96 MiB in six .npy files, or in one row group of a parquet file, and a budget of 24 MiB.

    The library's buffer of matrix products is not part of it: it is made in the first product, or in a later one.
    """
    (tmp_path / "corpus").mkdir()
    (tmp_path / "small").mkdir()
    draw = np.random.default_rng(1)
    rows = draw.standard_normal((6 * 65536, 64), dtype=np.float32)
    np.save(tmp_path / "queries.npy", rows[:400] + 0.2)
    for folder, some, files in (("corpus", rows, 6), ("small", rows[:20000], 1)):
        if kind == "npy":
            for number, part in enumerate(np.split(some, files)):
                np.save(tmp_path / folder / f"{number}.npy", part)
        else:
            column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(some.reshape(-1)), 64)
            pyarrow.parquet.write_table(pyarrow.table({"embedding": column}), tmp_path / folder / "rows.parquet")
    one = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread may map a buffer of its own
    done = children.run([sys.executable, "-c", PEAK, str(tmp_path)], check=True, env=one)
    assert int(done.stdout) <= checked_memory("24MiB") + BLAS_BUFFER
