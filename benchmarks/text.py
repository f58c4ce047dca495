"""The plug-in for sentence-transformers against that library's own loss and sampler, in the same process.

    python benchmarks/text.py                    # CPU, writes results/text.json
    python benchmarks/text.py --device cuda      # step and loss, writes results/text_gpu.json
    python benchmarks/text.py --only duplicates

step        a training step (encode two columns, loss, backward) with MultipleNegativesRankingLoss and with
            HardNegativeLoss, which also looks for equal texts; alternating, so that both see the same machine
loss        the loss and its gradient alone, on embeddings of the width of the model; on a CPU also the memory it adds
duplicates  500,000 pairs, of which some occur several times: the NO_DUPLICATES sampler (time to the first batch, and of
            an epoch) against a shuffled sampler whose duplicates the loss masks (that, and the search in all batches)

On a CPU, step and loss are CPU times of this process with one thread, so that other processes count little; the
comparison of samplers is wall time. The model is a BERT of MiniLM's size (6 layers, 384) with random weights: the time
of a step does not depend on them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from record import commit, processor, write
from stopwatch import Stopwatch, summary
from torch import Tensor

import hardneg as hn
from hardneg.extras import required
from hardneg.integrations.sentence_transformers import HardNegativeLoss
from hardneg.integrations.text_columns import rows_share_ids, token_ids

RESULTS = Path(__file__).parents[1] / "results"
WORDS, LENGTH, WIDTH = 5000, 12, 384  # vocabulary, words in a text, width of the model
PAIRS, BATCH, TEXTS = 500_000, 128, 400_000  # of the comparison of samplers; 400,000 different anchors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=["step", "loss", "duplicates"])
    parser.add_argument("--sizes", type=int, nargs="+", help="batch sizes of step and loss")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--peak", choices=["theirs", "ours"], help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.peak is not None:
        print(resident_bytes(options.peak, options.sizes[0]))
        return
    watch = Stopwatch(torch.device(options.device))
    fitting = {"step", "loss"} if watch.on_gpu else {"step", "loss", "duplicates"}  # samplers run on the host
    sections = {options.only} if options.only else fitting
    if not watch.on_gpu:
        torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/text.py", *sys.argv[1:]]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if watch.on_gpu else f"{processor()}, {torch.get_num_threads()} threads",
        "versions": {name: required(name, "text").__version__ for name in ("torch", "sentence_transformers")},
    }
    if "step" in sections:
        sizes = options.sizes or ([64, 512, 4096] if watch.on_gpu else [64, 512])
        record["step"] = [step(watch, size, options.repetitions) for size in sizes]
    if "loss" in sections:
        record["loss"] = [loss_alone(watch, size, options.repetitions) for size in options.sizes or [64, 512, 4096]]
    if "duplicates" in sections:
        record["duplicates"] = duplicates(options.pairs)
    if options.only is None and options.sizes is None and options.pairs == PAIRS:
        write(RESULTS / ("text_gpu.json" if watch.on_gpu else "text.json"), record)


def step(watch: Stopwatch, batch: int, repetitions: int) -> dict[str, Any]:
    """Time and memory of a whole training step."""
    model = encoder().to(watch.device).train()
    generator = torch.Generator().manual_seed(batch)
    columns = [
        {
            "input_ids": torch.randint(5, WORDS, (batch, LENGTH + 2), generator=generator).to(watch.device),
            "attention_mask": torch.ones(batch, LENGTH + 2, dtype=torch.long, device=watch.device),
        }
        for _ in range(2)
    ]

    def run(loss: Any) -> Callable[[], None]:
        def one() -> None:
            model.zero_grad(set_to_none=True)
            loss([dict(column) for column in columns], None).backward()

        return one

    theirs, ours = ranking_loss(model), HardNegativeLoss(model, hn.simcse(0.05))
    return compared(watch, f"step, B = {batch}", {"theirs": run(theirs), "ours": run(ours)}, repetitions)


def loss_alone(watch: Stopwatch, batch: int, repetitions: int) -> dict[str, Any]:
    """Time and memory of the loss and of its gradient in the embeddings."""
    runs = {name: loss_run(name, batch, watch.device) for name in ("theirs", "ours")}
    result = compared(watch, f"loss, B = {batch}", runs, 3 * repetitions)
    if not watch.on_gpu:
        for name in runs:
            command = [sys.executable, __file__, "--peak", name, "--sizes", str(batch)]
            printed = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
            result[name]["resident_bytes"] = int(printed.split()[-1])
        theirs, ours = (result[name]["resident_bytes"] / 2**20 for name in ("theirs", "ours"))
        print(f"{'':16s} theirs {theirs:9.1f} MiB  ours {ours:9.1f} MiB")
    return result


def loss_run(name: str, batch: int, device: torch.device) -> Callable[[], None]:
    """A forward and backward pass of the loss alone, theirs or ours."""
    z1, z2 = (torch.randn(batch, WIDTH, device=device, requires_grad=True) for _ in range(2))
    nothing: Any = torch.nn.Identity()
    loss: Any = ranking_loss(nothing) if name == "theirs" else HardNegativeLoss(nothing, hn.simcse(0.05))

    def one() -> None:
        z1.grad = z2.grad = None
        loss.compute_loss_from_embeddings([z1, z2], None).backward()

    return one


def resident_bytes(name: str, batch: int) -> int:
    """By how much a pass of the loss raises the peak of this process's resident memory, after a small one."""
    torch.set_num_threads(1)
    loss_run(name, 8, torch.device("cpu"))()
    run = loss_run(name, batch, torch.device("cpu"))
    before = peak_resident()
    run()
    return peak_resident() - before


def peak_resident() -> int:
    """The peak of this process's resident memory in bytes. Unlike ru_maxrss it does not start at that of the parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def compared(watch: Stopwatch, title: str, runs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, Any]:
    """Milliseconds of each run, and the median ratio of ours to theirs in the same round; on a GPU also memory."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int | None] = {}
    for run in runs.values():
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            before = watch.used_bytes()
            found[name].append(watch.wall(run) if watch.on_gpu else cpu_ms(run))
            peak = watch.peak_bytes()
            peaks[name] = None if peak is None else peak - before
    ratio = statistics.median(a / b for a, b in zip(found["ours"], found["theirs"], strict=True))
    result: dict[str, Any] = {"case": title, "ratio": ratio}
    for name, ms in found.items():
        result[name] = summary(ms) | ({} if peaks[name] is None else {"peak_bytes": peaks[name]})
    memory = "" if peaks["ours"] is None else f", memory {peaks['ours'] / max(1, peaks['theirs'] or 1):.2f}"
    print(
        f"{title:16s} theirs {result['theirs']['ms']:9.2f} ms   ours {result['ours']['ms']:9.2f} ms   "
        f"ratio {ratio:.2f}{memory}"
    )
    return result


def cpu_ms(run: Callable[[], None]) -> float:
    """Milliseconds of CPU time of one run."""
    begin = time.process_time()
    run()
    return 1000 * (time.process_time() - begin)


def duplicates(pairs: int) -> dict[str, Any]:
    """Seconds to the first batch and of an epoch of batches, without the encoder."""
    sampler = required("sentence_transformers.base.sampler", "text")
    data = required("datasets", "data").Dataset.from_dict(
        {"anchor": texts(pairs, TEXTS, 0), "positive": texts(pairs, 10 * pairs, 1)}
    )
    shared: dict[str, Any] = {"batch_size": BATCH, "drop_last": True, "generator": torch.Generator(), "seed": 0}

    def shuffled() -> Any:
        return sampler.DefaultBatchSampler(torch.utils.data.RandomSampler(data), **shared)

    makers: dict[str, Callable[[], Any]] = {
        "no_duplicates": lambda: sampler.NoDuplicatesBatchSampler(data, **shared),
        "no_duplicates_hashed": lambda: sampler.NoDuplicatesBatchSampler(data, precompute_hashes=True, **shared),
        "masked in the loss": shuffled,
    }
    result: dict[str, Any] = {"pairs": pairs, "batch_size": BATCH, "different_anchors": min(TEXTS, pairs)}
    for name, make in makers.items():
        begin = time.perf_counter()
        try:
            batches = iter(make())
            next(batches)
        except ImportError as error:
            result[name] = {"skipped": str(error)}
            continue
        first = time.perf_counter() - begin
        number = 1 + sum(1 for _ in batches)
        epoch = time.perf_counter() - begin
        if name == "masked in the loss":
            epoch += number * search_seconds()
        result[name] = {"first_batch_s": first, "epoch_s": epoch, "batches": number}
        print(f"{name:22s} first batch {first:8.3f} s   epoch {epoch:8.2f} s   {number} batches")
    return result


def search_seconds(repetitions: int = 50) -> float:
    """Median seconds of the search for equal texts in one batch of pairs."""
    tokens = torch.randint(5, WORDS, (2, BATCH, LENGTH + 2))
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        columns: Sequence[Tensor] = [token_ids({"input_ids": column}) for column in tokens]
        rows_share_ids(torch.stack(tuple(columns), dim=1))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def texts(number: int, different: int, seed: int) -> list[str]:
    """Texts of random words, of which only so many are different."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(different, (number,), generator=generator).tolist()
    return [" ".join(f"w{key * (place + 7) % 99991}" for place in range(LENGTH)) + f" t{key}" for key in keys]


def ranking_loss(model: Any) -> Any:
    """Their loss with its default settings."""
    losses = required("sentence_transformers.sentence_transformer.losses", "text")
    return losses.MultipleNegativesRankingLoss(model, scale=20.0)


def encoder() -> Any:
    """A SentenceTransformer of MiniLM's size with random weights and a vocabulary of numbered words."""
    transformers, tokenizers = required("transformers", "text"), required("tokenizers", "text")
    modules = required("sentence_transformers.sentence_transformer.modules", "text")
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *(f"w{i}" for i in range(WORDS))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    with tempfile.TemporaryDirectory() as folder:
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        transformers.BertModel(config).save_pretrained(folder)
        transformer = modules.Transformer(folder)
    pooling = modules.Pooling(transformer.get_embedding_dimension())
    return required("sentence_transformers", "text").SentenceTransformer(modules=[transformer, pooling], device="cpu")


if __name__ == "__main__":
    main()
