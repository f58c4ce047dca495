"""Hardness of proximity batches by the embeddings that the graph is built from, for one trained run.

    python benchmarks/batch_hardness.py RUN [--candidates 500] [--neighbors 100] [--restarts 0.2 0.05]

RUN is the folder of a SimCLR run on labeled images, with its checkpoint. Cosines are those of plain images in
evaluation mode for every graph.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from hardneg.evaluation import extract
from hardneg.images import ImageSet
from hardneg.losses.inputs import normalized
from hardneg.samplers import ProximityBatchSampler, ProximityGraph, false_negative_share, mean_cosine
from hardneg.training import build, recipe

CHUNK = 250  # images at a time in training mode


@torch.no_grad()
def seen_in_training(
    network: nn.Module, images: Tensor, views: nn.Module | object, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Unit embeddings (N, d) of two augmented views of each image, with batch-norm statistics of random batches."""
    generator = torch.Generator(images.device).manual_seed(seed)
    network.train()
    first, second = [], []
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    for part in torch.split(order, CHUNK):
        z = normalized(network(views(images[part], generator, views=2)))  # type: ignore[operator]
        one, two = z.chunk(2)
        first.append(one)
        second.append(two)
    back = order.argsort()
    return torch.cat(first)[back], torch.cat(second)[back]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--neighbors", type=int, default=100)
    parser.add_argument("--restarts", type=float, nargs="+", default=[0.2, 0.05])
    options = parser.parse_args()
    settings = recipe.load(options.run / "recipe.yaml")
    saved = torch.load(options.run / "last.ckpt", map_location="cpu", weights_only=True)
    data = settings.kind.load(settings.data, labels=True)
    assert isinstance(data, ImageSet)
    assert data.labels is not None
    module = build.method(settings, data)
    module.load_state_dict(saved["state_dict"])
    network = nn.Sequential(module.encoder, module.head)
    raw = extract(network, data.images, prepare=module.views.plain)  # type: ignore[union-attr]
    plain = normalized(raw)
    one, two = seen_in_training(network, data.images, module.views)
    sources = {
        "plain images, raw inner products": (raw, "shared"),
        "plain images": (plain, "shared"),
        "plain images, candidates drawn row by row": (plain, "independent"),
        "one augmented view": (one, "shared"),
        "two augmented views": (torch.cat([one, two], dim=1) / 2**0.5, "shared"),
    }
    low, high = raw.norm(dim=1).quantile(torch.tensor([0.01, 0.99])).tolist()
    print(f"step {saved['global_step']}, norms of the head's output from {low:.1f} (1 %) to {high:.1f} (99 %)\n")
    print("| graph built from | α | mean cosine | false negatives, % | samples drawn, % | in-degree, std / mean |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (rows, mode) in sources.items():
        graph = ProximityGraph.build(rows, options.candidates, options.neighbors, seed=1, mode=mode)
        degrees = graph.neighbors.flatten().long().bincount(minlength=len(data)).double()
        for restart in options.restarts:
            sampler = ProximityBatchSampler(
                len(data), settings.trainer.batch_size, options.candidates, options.neighbors, restart
            )
            sampler.refresh(rows)
            if mode == "independent":
                sampler._set_graph(graph)  # the sampler itself always shares candidates in blocks
            batches = torch.tensor(list(sampler))  # (S, B)
            cosine = sum(mean_cosine(plain[batch]) for batch in batches) / len(batches)
            false = 100 * false_negative_share(data.labels[batches])
            seen = 100 * len(set(batches.flatten().tolist())) / len(data)
            spread = float(degrees.std() / degrees.mean())
            print(f"| {name} | {restart} | {cosine:.3f} | {false:.1f} | {seen:.1f} | {spread:.2f} |", flush=True)


if __name__ == "__main__":
    main()
