"""Time and memory of mining hard negatives, compared with sentence-transformers' mine_hard_negatives in the same run.

    python benchmarks/mining.py [--queries 50000 --documents 200000 --dim 384 --threads 2 --rounds 1]
    python benchmarks/mining.py --device cuda [--queries 1000000 --documents 1000000]      exact search on a GPU

All peers get the same embeddings and the same rule, 95 % of the positive, ten negatives, and make the training set of
n-tuples with scores. Each runs in a fresh process; the peers take turns.
  hardneg              hn.mine(memory="256MiB") and save to parquet
  st faiss             mine_hard_negatives(use_faiss=True), batches of 16,384 queries (its default)
  st torch             mine_hard_negatives(use_faiss=False), batches of 1,024 queries: 16,384 make a matrix of 13 GB
Memory is the peak of the resident set beyond what the process held before the call, which includes the embeddings.
"Same negatives" is the share of queries with the same ten documents, of those that have ten in both.

On a GPU: the 100 best documents of each query, from embeddings on the device to keys on the host, in blocks of 65,536
queries. The limit is the time of its products at the rate of an 8192³ product in float16 in the same run, and at 790
TFLOP/s. Then `hn.mine` as a whole, for two blocks of queries, from embeddings in the host's memory.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from numpy.typing import NDArray
from torch import Tensor

import hardneg as hn

RESULTS = Path(__file__).parents[1] / "results"
PEERS = ("hardneg", "st faiss", "st torch")
FILES = ("queries", "corpus", "positives")
NEGATIVES, DEPTH = 10, 101
GPU_BLOCK = 1 << 16  # queries per search on a GPU
Floats = NDArray[np.float32]


def embeddings(queries: int, documents: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, documents and the positive of each query.

    Documents are drawn around centers, 100 for each on average, and queries near a document: some neighbors are as near
    """
    draws = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=draws, device=device)
    centers = normal(max(1, documents // 100), dim)
    corpus = centers[torch.randint(len(centers), (documents,), generator=draws, device=device)]
    corpus += 0.7 * normal(documents, dim)
    positives = torch.randint(documents, (queries,), generator=draws, device=device)
    distance = 0.3 + 0.9 * torch.rand(queries, 1, generator=draws, device=device)
    near = corpus[positives] + distance * normal(queries, dim)
    return torch.nn.functional.normalize(near), torch.nn.functional.normalize(corpus), positives


class GivenModel:
    """What mine_hard_negatives uses of a SentenceTransformer, with embeddings that exist already."""

    device = torch.device("cpu")

    def __init__(self, queries: Floats, corpus: Floats) -> None:
        from sentence_transformers import util

        self.embeddings = {"q": queries, "d": corpus}
        self.similarity, self.similarity_pairwise = util.cos_sim, util.pairwise_cos_sim

    def encode_document(self, texts: list[str], **_: Any) -> Floats:
        return self._rows("d", texts)

    encode_query = lambda self, texts, **_: self._rows("q", texts)  # noqa: E731

    def _rows(self, kind: str, texts: list[str]) -> Floats:
        assert texts == [f"{kind}{number}" for number in range(len(texts))]
        return self.embeddings[kind]

    def get_embedding_dimension(self) -> int:
        return int(self.embeddings["d"].shape[1])


def mined_by_hardneg(folder: Path, queries: Floats, corpus: Floats, positives: NDArray[np.int64]) -> NDArray[np.int64]:
    mined = hn.mine(queries, corpus, positives, num_negatives=NEGATIVES, rank_range=(0, DEPTH), memory="256MiB")
    mined.save(folder / "hardneg.parquet", format="n-tuple", scores=True)
    return np.asarray(mined.indices)


def mined_by_peer(
    peer: str, queries: Floats, corpus: Floats, positives: NDArray[np.int64]
) -> tuple[float, float, NDArray[np.int64]]:
    """Seconds, bytes and negatives of sentence-transformers."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    names = [f"d{number}" for number in range(len(corpus))]
    pairs = Dataset.from_dict({"a": [f"q{n}" for n in range(len(queries))], "b": [names[p] for p in positives]})
    model: Any = GivenModel(queries, corpus)
    faiss = peer == "st faiss"
    before, start = resident("VmRSS"), time.perf_counter()
    found = mine_hard_negatives(
        pairs, model, corpus=names, relative_margin=0.05, num_negatives=NEGATIVES, range_max=DEPTH, use_faiss=faiss,
        output_format="n-tuple", output_scores=True, faiss_batch_size=16384 if faiss else 1024, verbose=False,
    )  # fmt: skip
    seconds, extra = time.perf_counter() - start, resident("VmHWM") - before
    indices = np.full((len(queries), NEGATIVES), -1)
    rows = [int(name[1:]) for name in found["a"]]
    for number in range(NEGATIVES):
        indices[rows, number] = [int(name[1:]) for name in found[f"negative_{number + 1}"]]
    return seconds, extra, indices


def resident(name: str) -> float:
    """VmRSS, the resident memory of this process in bytes, or VmHWM, its peak since the last VmRSS."""
    if name == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def child(folder: Path, peer: str, threads: int) -> None:
    """Mine with one peer; prints seconds and bytes, writes the negatives."""
    import faiss

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    queries, corpus, positives = (np.load(folder / f"{name}.npy") for name in FILES)
    # The libraries load parts of themselves at the first call.
    if peer == "hardneg":
        mined_by_hardneg(folder, queries[:64], corpus[:512], np.arange(64))
        before, start = resident("VmRSS"), time.perf_counter()
        indices = mined_by_hardneg(folder, queries, corpus, positives)
        seconds, extra = time.perf_counter() - start, resident("VmHWM") - before
    else:
        mined_by_peer(peer, queries[:64], corpus[:512], np.arange(64))
        seconds, extra, indices = mined_by_peer(peer, queries, corpus, positives)
    np.save(folder / f"{peer}.npy", indices)
    print(json.dumps({"seconds": seconds, "bytes": extra}))


def same_share(one: NDArray[np.int64], other: NDArray[np.int64]) -> tuple[float, int]:
    """Share of rows with the same documents, of those that are complete in both, and their number."""
    complete = (one[:, -1] >= 0) & (other[:, -1] >= 0)
    same = np.sort(one[complete], axis=1) == np.sort(other[complete], axis=1)
    return float(same.all(axis=1).mean()), int(complete.sum())


def compare_on_cpu(given: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays = embeddings(given.queries, given.documents, given.dim, "cpu")
        for each, array in zip(FILES, arrays, strict=True):
            np.save(folder / f"{each}.npy", array.numpy())
        del arrays
        for number in range(given.rounds):
            for peer in PEERS[number % 3 :] + PEERS[: number % 3]:
                command = [sys.executable, __file__, "--peer", peer, "--folder", name, "--threads", str(given.threads)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8")
                found[peer].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{peer:10} {found[peer][-1]['seconds']:8.1f} s {found[peer][-1]['bytes'] / 2**20:8.0f} MiB")
        negatives = {peer: np.load(folder / f"{peer}.npy") for peer in PEERS}
    own = found["hardneg"]
    rows = []
    for peer in PEERS:
        same, complete = same_share(negatives["hardneg"], negatives[peer])
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(found[peer], own, strict=True))
        memory = statistics.median(b["bytes"] / a["bytes"] for a, b in zip(found[peer], own, strict=True))
        rows.append({"peer": peer, "runs": found[peer], "its_time_to_ours": ratio, "our_memory_to_its": memory,
                     "same_negatives": same, "complete_queries": complete})  # fmt: skip
        print(f"{peer:10} time ÷ ours {ratio:.2f} · our memory ÷ its {memory:.2f} · same negatives {same:.4f}")
    record.write(given.to or RESULTS / "mining.json", {**settings(given), "rows": rows})


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The command, the machine and the versions."""
    return {
        "command": f"python benchmarks/mining.py --rounds {given.rounds}" + " --device cuda" * (given.device == "cuda"),
        "commit": record.commit(), "processor": record.processor(), "threads": given.threads,
        "torch": torch.__version__, "python": platform.python_version(), "hardneg": hn.__version__,
        "queries": given.queries, "documents": given.documents, "dim": given.dim,
    }  # fmt: skip


def measure_on_gpu(given: argparse.Namespace) -> None:
    from hardneg.mining.search import Searcher
    from hardneg.mining.vectors import Vectors

    queries, corpus, positives = embeddings(given.queries, given.documents, given.dim, "cuda")
    product = 2 * given.queries * given.documents * given.dim  # operations
    square = torch.randn(8192, 8192, device="cuda").half()
    rows = []
    for rounds in range(given.rounds + 1):
        searcher = Searcher.within(Vectors("corpus", corpus), 2**31, "cuda")
        total = on_gpu(partial(search, searcher, queries))
        rate = 20 * 2 * 8192**3 / on_gpu(lambda: [square @ square for _ in range(20)])
        if rounds:
            shares = {"share_of_limit": product / rate / total, "share_at_790_tflops": product / 790e12 / total}
            rows.append({"seconds": total, "product_tflops": rate / 1e12, **shares})
            print(f"{total:.2f} s: {shares['share_of_limit']:.2f} of {rate / 1e12:.0f} TFLOP/s")
    few, documents, positives = queries[: 2 * GPU_BLOCK].cpu(), corpus.cpu(), positives[: 2 * GPU_BLOCK].cpu()
    whole = on_gpu(lambda: hn.mine(few, documents, positives, num_negatives=NEGATIVES))
    made = {"queries": len(few), "seconds": whole, "search_seconds": rows[-1]["seconds"] * len(few) / given.queries}
    print(f"hn.mine for {len(few)} queries from host memory: {whole:.1f} s")
    found = {**settings(given), "device": torch.cuda.get_device_name(), "rows": rows, "mine": made}
    record.write(given.to or RESULTS / "mining_gpu.json", found)


def search(searcher: Any, queries: Tensor) -> None:
    """The 100 best documents of all queries."""
    for first in range(0, len(queries), GPU_BLOCK):
        searcher.best(queries[first : first + GPU_BLOCK], 100)


def on_gpu(run: Callable[[], Any]) -> float:
    """Seconds until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        child(given.folder, given.peer, given.threads)
        return
    cpu = given.device == "cpu"
    given.queries = given.queries or (50_000 if cpu else 1_000_000)
    given.documents = given.documents or (200_000 if cpu else 1_000_000)
    compare_on_cpu(given) if cpu else measure_on_gpu(given)


if __name__ == "__main__":
    main()
