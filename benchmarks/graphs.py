"""Accuracy of InfoGraph and GraphCL on TU sets with the papers' protocol, and the time of an epoch against a loop.

    HARDNEG_DATA=… python benchmarks/graphs.py [--sets MUTAG] [--runs infograph graphcl] [--seeds 5] [--epochs 20]
    HARDNEG_DATA=… python benchmarks/graphs.py --speed [--steps 16]

InfoGraph (HCL, appendix D.2): GIN of 3 layers of 32, batch 128, Adam 1e-3, 200 epochs, β ∈ {0, 1, 2, 10}, nodes
  described by their labels, or by their degree where a set has none
GraphCL (its authors' code, and ProSampler's appendix E.2): the same encoder, Adam 1e-2, temperature 0.2, the graph
  itself against one of the four augmentations, nodes described by their labels or by a constant; uniform batches and
  the proximity sampler, with the paper's settings where it names the set
Evaluation: RBF SVM on the encoder's output, as it is, C chosen by 5-fold CV in each training part, stratified 10-fold.
  The last epoch is evaluated, once: no epoch is chosen by its accuracy.
Accuracies are means over seeds of (network, batches, views, folds); ``std`` is the deviation over seeds, n − 1 below.
Runs are added to the results one by one; a run that is there already is replaced.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import softplus

import hardneg as hn
from hardneg.batches import ProximityBatchSampler, UniformBatchSampler
from hardneg.data.graphs import GraphSet, geometric, load_graphs
from hardneg.encoders.gin import GIN, Discriminator
from hardneg.evaluation.svm import svm_accuracy
from hardneg.methods.graphcl import GraphCL, GraphMethod, graph_projection
from hardneg.methods.infograph import InfoGraph
from hardneg.objectives.jsd import JSD
from hardneg.training.batches import Batches
from hardneg.training.refresh import Refresh
from hardneg.views.graphs import GraphViews

RESULTS = Path(__file__).parents[1] / "results" / "graphs.json"
BETAS = (0.0, 1.0, 2.0, 10.0)
# Batch, epochs, steps between graphs, candidates, neighbours: ProSampler's Table 8, and GraphCL's 20 epochs elsewhere.
PROSAMPLER = {
    "IMDB-BINARY": (256, 100, 25, 300, 100),
    "IMDB-MULTI": (128, 50, 25, 300, 100),
    "COLLAB": (128, 20, 50, 1000, 100),
    "REDDIT-BINARY": (128, 50, 50, 500, 100),
    "MUTAG": (32, 20, 6, 100, 20),  # a batch of 128 would be two thirds of the set, whoever draws it
    "PTC_MR": (64, 20, 6, 100, 30),
}
ELSEWHERE = (128, 20, 10, 300, 100)
PUBLISHED: dict[str, dict[str, str]] = {
    "MUTAG": {"infograph": "86.8 (H-SCL, Table II); 89.0 (InfoGraph)", "hard": "87.2, best β", "graphcl": "86.8"},
    "ENZYMES": {"infograph": "50.4 (H-SCL, Table II)", "hard": "50.4, best β"},
    "PTC_MR": {"infograph": "55.3 (H-SCL, Table II)", "hard": "57.3, best β"},
    "IMDB-BINARY": {
        "infograph": "72.2 (H-SCL, Table II); 73.0 (InfoGraph)",
        "hard": "72.8, best β",
        "graphcl": "70.90 ± 0.53",
        "proximity": "71.90 ± 0.46",
    },
    "IMDB-MULTI": {"infograph": "49.6", "hard": "49.6, best β", "graphcl": "48.48 ± 0.38", "proximity": "48.93 ± 0.28"},
    "PROTEINS": {"graphcl": "74.4"},
}


NOTE = (
    "Other work shared the machine: seconds are upper bounds. Untrained GIN is the same encoder before any step. "
    "On REDDIT-BINARY the network, the same for both ways, bounds their ratio."
)


def infograph(graphs: GraphSet, seed: int, objective: JSD) -> GraphMethod:
    torch.manual_seed(seed)
    encoder = GIN(graphs.node_features)
    heads = Discriminator(encoder.features), Discriminator(encoder.features)
    return InfoGraph(encoder, *heads, objective, lambda module: torch.optim.Adam(module.parameters(), 1e-3), seed=seed)


def graphcl(graphs: GraphSet, seed: int) -> GraphMethod:
    torch.manual_seed(seed)
    encoder = GIN(graphs.node_features)
    head = graph_projection(encoder.features)
    adam: Callable[[Any], torch.optim.Optimizer] = lambda module: torch.optim.Adam(module.parameters(), 1e-2)  # noqa: E731
    return GraphCL(encoder, head, hn.graphcl(), GraphViews(), adam, seed=seed)


def fit(module: GraphMethod, graphs: GraphSet, sampler: UniformBatchSampler, epochs: int) -> float:
    """Train, and return the seconds it took."""
    module.graphs = graphs
    callbacks: list[L.Callback] = []
    if isinstance(sampler, ProximityBatchSampler):
        unit = torch.nn.functional.normalize
        callbacks.append(Refresh(sampler, lambda: unit(module.embeddings(graphs))))
    trainer = L.Trainer(
        max_epochs=1,  # the batches of all epochs come as one
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    began = time.perf_counter()
    trainer.fit(module, Batches(sampler, epochs))
    return time.perf_counter() - began


def planned(graphs: str, chosen: list[str], epochs: int | None) -> list[dict[str, Any]]:
    """The runs of one set, as the rows of the results will name them."""
    size, long, every, candidates, neighbors = PROSAMPLER.get(graphs, ELSEWHERE)
    runs: list[dict[str, Any]] = []
    if "untrained" in chosen:
        runs.append({"method": "untrained GIN", "epochs": 0, "batch": 128})
    if "infograph" in chosen:
        runs += [{"method": "infograph", "beta": beta, "epochs": epochs or 200, "batch": 128} for beta in BETAS]
    if "published" in chosen:
        code = {"method": "infograph, published code's loss", "epochs": epochs or 200, "batch": 128}
        runs += [code | {"beta": beta} for beta in BETAS]
    if "graphcl" in chosen:
        both = {"method": "graphcl", "epochs": epochs or long, "batch": size}
        runs += [both | {"sampler": "uniform"}]
        runs += [
            both | {"sampler": "proximity", "refresh_every": every, "candidates": candidates, "neighbors": neighbors}
        ]
    return runs


def run(plan: dict[str, Any], graphs: GraphSet, seed: int) -> tuple[float, float, float, float]:
    """One seed: accuracy, deviation among folds, seconds of training, seconds of evaluation."""
    size = min(plan["batch"], len(graphs))
    common: dict[str, Any] = {"size": len(graphs), "batch_size": size, "seed": seed, "drop_last": False}
    sampler = UniformBatchSampler(**common)
    if plan.get("sampler") == "proximity":
        candidates = min(plan["candidates"], len(graphs) - 1)
        links = {"candidates": candidates, "neighbors": min(plan["neighbors"], candidates)}
        restart = hn.Linear(0.2, 0.05)
        sampler = ProximityBatchSampler(**common, **links, restart=restart, refresh_every=plan["refresh_every"])
    if plan["method"] == "graphcl":
        module = graphcl(graphs, seed)
    else:
        module = infograph(graphs, seed, JSD(plan.get("beta", 0.0), published="published" in plan["method"]))
    seconds = fit(module, graphs, sampler, plan["epochs"]) if plan["epochs"] else 0.0
    began = time.perf_counter()
    result = svm_accuracy(module.embeddings(graphs), graphs.labels, seed=seed, jobs=1)
    return 100 * result.mean, 100 * result.std_of_folds, seconds, time.perf_counter() - began


def figure(name: str, plan: dict[str, Any]) -> str | None:
    known = PUBLISHED.get(name, {})
    if plan["method"] == "infograph":
        return known.get("infograph" if plan["beta"] == 0 else "hard")
    if plan["method"] == "graphcl":
        return known.get("graphcl" if plan["sampler"] == "uniform" else "proximity")
    return None


def accuracies(args: argparse.Namespace) -> None:
    for name in args.sets:
        for plan in planned(name, args.runs, args.epochs):
            graphs = load_graphs(name, features="auto")
            if plan["method"] == "graphcl" and graphs.node_features and name not in ("MUTAG", "PTC_MR", "PROTEINS"):
                graphs = load_graphs(name, features="constant")
            began = time.perf_counter()
            found = [run(plan, graphs, seed) for seed in range(args.seeds)]
            scores, folds, training, judging = zip(*found, strict=True)
            row = {"kind": "accuracy", "set": name, **plan, "node_features": graphs.node_features}
            row |= {
                "accuracy": round(statistics.mean(scores), 2),
                "std": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
                "std_is": "over seeds, n − 1 below",
                "std_of_folds": round(statistics.mean(folds), 2),
                "seeds": list(range(args.seeds)),
                "accuracies": [round(score, 2) for score in scores],
                "published": figure(name, plan),
                "training_seconds": round(statistics.mean(training), 2),
                "svm_seconds": round(statistics.mean(judging), 2),
                "all_seconds": round(time.perf_counter() - began, 1),
            }
            record(row)


# --- the time of an epoch ---


def loop_loss(nodes: Tensor, graphs: Tensor, batch: Tensor) -> Tensor:
    """The plain way: two masks over all pairs, filled node by node."""
    own, other = torch.zeros(len(nodes), len(graphs)), torch.ones(len(nodes), len(graphs))
    for node, graph in enumerate(batch):
        own[node][graph] = 1.0
        other[node][graph] = 0.0
    scores = nodes @ graphs.T
    attraction = (own * softplus(-scores)).sum() / len(nodes)
    return attraction + (other * softplus(scores)).sum() / (len(nodes) * (len(graphs) - 1))


def speed(args: argparse.Namespace) -> None:
    """Seconds of an epoch of InfoGraph on REDDIT-BINARY, both ways on the same batches, one after the other."""
    graphs = load_graphs("REDDIT-BINARY")
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"hardneg": JSD(), "loop over nodes": loop_loss}
    modules = {name: infograph(graphs, 0, JSD()) for name in ways}
    optimisers = {name: torch.optim.Adam(module.parameters(), 1e-3) for name, module in modules.items()}
    sampler = UniformBatchSampler(len(graphs), 128, seed=0, drop_last=False)
    whole, losses = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    values: dict[str, list[float]] = {name: [] for name in ways}
    steps = 0
    for index in sampler:
        if steps == args.steps:
            break
        steps += 1
        for name, way in ways.items():
            module = modules[name]
            assert isinstance(module, InfoGraph)
            began = time.perf_counter()
            batch = graphs.batch(torch.tensor(index))
            nodes = module.encoder.nodes(batch)  # type: ignore[operator]
            pooled = module.head(module.encoder.pool(nodes, batch))  # type: ignore[operator]
            local = module.node_head(nodes)
            leaves = local.detach().requires_grad_(), pooled.detach().requires_grad_()
            middle = time.perf_counter()
            loss = way(*leaves, batch.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[name] += time.perf_counter() - middle
            optimisers[name].zero_grad()
            torch.autograd.backward([local, pooled], [leaf.grad for leaf in leaves if leaf.grad is not None])
            optimisers[name].step()
            whole[name] += time.perf_counter() - began
            values[name].append(loss.item())
    first, second = (found[0] for found in values.values())  # later, rounding has led the two networks apart
    for name in ways:
        record(
            {
                "kind": "speed",
                "set": "REDDIT-BINARY",
                "way": name,
                "steps": steps,
                "batch": 128,
                "seconds": round(whole[name], 2),
                "seconds_of_loss_and_its_gradient": round(losses[name], 2),
                "times_hardneg": round(whole[name] / whole["hardneg"], 2),
                "loss_times_hardneg": round(losses[name] / losses["hardneg"], 2),
                "relative_difference_of_first_losses": abs(first - second) / second,
            }
        )


def record(row: dict[str, Any]) -> None:
    """Add a row to the results, with how it came about."""
    row |= {
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    names = ("kind", "set", "method", "beta", "sampler", "epochs", "way", "threads")
    rows = [old for old in results["rows"] if any(old.get(name) != row.get(name) for name in names)]
    results |= {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_geometric": geometric("torch_geometric").__version__,
            "hardneg": hn.__version__,
        },
        "note": NOTE,
        "rows": sorted([*rows, row], key=lambda each: (each["kind"], each["set"])),
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({key: row[key] for key in row if key not in ("command", "seeds", "std_is")}, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["MUTAG"])
    kinds = ["untrained", "infograph", "published", "graphcl"]
    parser.add_argument("--runs", nargs="+", default=["untrained", "infograph", "graphcl"], choices=kinds)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--epochs", type=int, help="instead of the papers'")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--speed", action="store_true", help="time an epoch instead")
    parser.add_argument("--steps", type=int, default=16, help="batches to time; 16 are an epoch of REDDIT-BINARY")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    speed(args) if args.speed else accuracies(args)


if __name__ == "__main__":
    main()
