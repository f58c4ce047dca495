"""The time of an epoch of InfoGraph on REDDIT-BINARY, compared with the plain implementation that loops over nodes.

    HARDNEG_DATA=… python benchmarks/graphs.py [--steps 16] [--threads 1]

All implementations train the same network (GIN of 3 layers of 32, two discriminators, Adam) on the same batches of 128
graphs, interleaved within each step, so that other load of the machine affects all.

loop over nodes: InfoGraph's published code. PyG's loader collates graphs that lie in memory, two masks over
  all pairs of nodes and graphs are filled node by node, all scores are computed at once
hardneg: as `hardneg train` does it. A batch is indexed from the set's tensors, equivalent nodes are compared once, and
  scores are computed tile by tile
hardneg, every node: the same without merging equivalent nodes

Accuracies are measured by benchmarks/graph_accuracy.py, which writes to the same file.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import processor
from torch import Tensor
from torch.nn.functional import softplus

import hardneg as hn
from hardneg.extras import required
from hardneg.graphs.data import GraphSet, load_graphs
from hardneg.graphs.gin import GIN, Discriminator
from hardneg.losses.jsd import JSD
from hardneg.methods.infograph import InfoGraph
from hardneg.samplers import UniformBatchSampler

RESULTS = Path(__file__).parents[1] / "results" / "graphs.json"
SET, BATCH = "REDDIT-BINARY", 128
NOTE = "Other work shared the machine: seconds are upper bounds. Untrained GIN is the same encoder before any step."


def loop_loss(nodes: Tensor, graphs: Tensor, batch: Tensor) -> Tensor:
    """The plain implementation: two masks over all pairs, filled node by node."""
    own, other = torch.zeros(len(nodes), len(graphs)), torch.ones(len(nodes), len(graphs))
    for node, graph in enumerate(batch):
        own[node][graph] = 1.0
        other[node][graph] = 0.0
    scores = nodes @ graphs.T
    attraction = (own * softplus(-scores)).sum() / len(nodes)
    return attraction + (other * softplus(scores)).sum() / (len(nodes) * (len(graphs) - 1))


def plain_loss(module: InfoGraph, batch: Any) -> Tensor:
    """InfoGraph's loss of a PyG batch, by the loop."""
    nodes: Tensor = module.encoder.nodes(batch)  # type: ignore[operator]
    pooled: Tensor = module.encoder.pool(nodes, batch)  # type: ignore[operator]
    return loop_loss(module.node_head(nodes), module.head(pooled), batch.batch)


def loss(module: InfoGraph, batch: Any) -> Tensor:
    return module.loss(batch, batch.index, None)


def epoch(graphs: GraphSet, steps: int) -> dict[str, dict[str, float]]:
    """Seconds of each implementation in total and for making the batch, and the first loss."""
    listed = [graphs[number] for number in range(len(graphs))]
    collate = required("torch_geometric.loader.dataloader", "graph").Collater(listed)  # what PyG's loader calls
    started = time.perf_counter()
    graphs.equivalent_nodes(hops=3)
    found = time.perf_counter() - started  # once per set
    ways: dict[str, tuple[Callable[[list[int]], Any], Callable[[InfoGraph, Any], Tensor]]] = {
        "hardneg": (lambda index: graphs.batch(torch.tensor(index), hops=3), loss),
        "hardneg, every node": (lambda index: graphs.batch(torch.tensor(index)), loss),
        "loop over nodes": (lambda index: collate([listed[number] for number in index]), plain_loss),
    }
    modules, optimisers = {}, {}
    for way in ways:
        torch.manual_seed(0)
        encoder = GIN(graphs.node_features)
        heads = Discriminator(encoder.features), Discriminator(encoder.features)
        modules[way] = InfoGraph(encoder, *heads, JSD(), torch.optim.Adam)  # type: ignore[arg-type]
        optimisers[way] = torch.optim.Adam(modules[way].parameters(), 1e-3)
    results: dict[str, dict[str, float]] = {way: {"seconds": 0.0, "loading": 0.0} for way in ways}
    for step, index in enumerate(UniformBatchSampler(len(graphs), BATCH, seed=0, drop_last=False)):
        if step == steps:
            break
        for way, (load, value) in ways.items():
            began = time.perf_counter()
            batch = load(index)
            loaded = time.perf_counter()
            cost = value(modules[way], batch)
            optimisers[way].zero_grad()
            cost.backward()  # type: ignore[no-untyped-call]
            optimisers[way].step()
            results[way]["seconds"] += time.perf_counter() - began
            results[way]["loading"] += loaded - began
            results[way].setdefault("first_loss", cost.item())  # later losses differ by rounding
    results["hardneg"]["finding_twins_once"] = found
    return results


def rows() -> list[dict[str, Any]]:
    """What has been recorded so far."""
    return list(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]) if RESULTS.exists() else []


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of the same run."""
    names = ("kind", "set", "method", "beta", "lr", "layers", "sampler", "epochs", "batch", "way", "threads")
    return all(one.get(name) == other.get(name) for name in names)


def record(row: dict[str, Any], command: str) -> None:
    """Add a row to the results with its command; it replaces an earlier row of the same run."""
    row = row | {"command": command, "load_average": round(os.getloadavg()[0], 1)}
    others = [old for old in rows() if not same_run(old, row)]
    results = {
        "machine": {"processor": processor(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_geometric": required("torch_geometric", "graph").__version__,
            "hardneg": hn.__version__,
        },
        "note": NOTE,
        "rows": sorted([*others, row], key=lambda each: (each["kind"], each["set"])),
    }
    # An interruption leaves a complete file.
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(RESULTS)
    print(json.dumps({key: row[key] for key in row if key not in ("command", "seeds", "std_is")}, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="batches to time; 16 are an epoch")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = epoch(load_graphs(SET), args.steps)
    ours, plain = results["hardneg"], results["loop over nodes"]
    for way, found in results.items():
        row = {"kind": "speed", "set": SET, "way": way, "steps": args.steps, "batch": BATCH, "threads": args.threads}
        row |= {name: round(number, 3) for name, number in found.items() if name != "first_loss"}
        row |= {
            "times_hardneg": round(found["seconds"] / ours["seconds"], 2),
            "relative_difference_of_first_losses": abs(found["first_loss"] / plain["first_loss"] - 1),
        }
        record(row, "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
