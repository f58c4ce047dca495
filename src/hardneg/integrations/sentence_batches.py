"""Batches of similar texts in the trainer of sentence-transformers, and callbacks that keep them up to date."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from hardneg import checks
from hardneg.checks import TensorLike
from hardneg.extras import required
from hardneg.losses.infonce import InfoNCE
from hardneg.losses.schedules import Setting
from hardneg.samplers import ProximityBatchSampler

_TrainerCallback: Any = required("transformers", "text").TrainerCallback

Encode = Callable[[nn.Module, Sequence[str]], TensorLike]


class ProximityBatches:
    """Makes batches of similar texts: ``SentenceTransformerTrainingArguments(batch_sampler=ProximityBatches())``.

    The trainer calls it once for each data set, the evaluation sets included. Batches are uniform until a
    `RefreshCallback` has encoded the training set; those of evaluation sets stay uniform.

    Args:
        candidates: of each row's neighbors, as in `hardneg.ProximityBatchSampler`; of a small data set all other rows
        neighbors: of each row, as there
        restart: probability of a step back to the first row of the batch, as there
        walk: kind of walk on the graph, as there
        weighted: whether steps are weighted by similarity, as there
        coverage: ``"once"``: each row is drawn once in an epoch; ``"walk"``: as published, some several times and some
            not at all

    Examples:
        >>> from hardneg.integrations.sentence_transformers import ProximityBatches
        >>> sampler = ProximityBatches(restart=0.2)(["a", "b", "c", "d", "e"], batch_size=2, drop_last=False, seed=1)
        >>> [len(batch) for batch in sampler], len(sampler)
        ([2, 2, 1], 3)
    """

    def __init__(
        self,
        candidates: int = 1000,
        neighbors: int = 100,
        restart: Setting = 0.1,
        walk: str = "restart",
        coverage: str = "once",
        weighted: bool = False,
    ) -> None:
        self.settings = {
            "candidates": candidates, "neighbors": neighbors, "restart": restart, "walk": walk, "coverage": coverage,
            "weighted": weighted,
        }  # fmt: skip
        ProximityBatchSampler(2, 1, **self.settings)  # type: ignore[arg-type]  # raises if a setting is wrong

    def __call__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        valid_label_columns: Sequence[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> Sampler[list[int]]:
        """The batch sampler of a data set; the arguments are those of the trainer."""
        size = len(dataset)
        if generator is not None:  # another one for each data set of a training
            seed = int(torch.randint(1 << 48, (), generator=generator))
        if size < 2 or (drop_last and size < batch_size):  # one batch or none, as the trainer's own sampler has
            return BatchSampler(range(size), batch_size, drop_last)
        return TextBatchSampler(dataset, batch_size, drop_last, valid_label_columns, seed, self.settings)

    def __repr__(self) -> str:
        return f"ProximityBatches({', '.join(f'{name}={given!r}' for name, given in self.settings.items())})"


class TextBatchSampler(ProximityBatchSampler):
    """The batches of one data set. labels: names of columns that hold no texts"""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        drop_last: bool,
        labels: Sequence[str] | None,
        seed: int,
        settings: dict[str, Any],
    ) -> None:
        size = len(dataset)
        candidates = min(settings["candidates"], size - 1)
        degrees = {"candidates": candidates, "neighbors": min(settings["neighbors"], candidates)}
        super().__init__(size, batch_size, seed=seed, drop_last=drop_last, **(settings | degrees))
        self._dataset, self._labels = dataset, tuple(labels or ())

    def texts(self, column: str | None = None) -> tuple[str, list[str]]:
        """The name and the texts of a column, by default of the first one that holds no labels."""
        names = [name for name in self._dataset.column_names if name not in (*self._labels, "dataset_name")]
        if column is not None and column not in names:
            raise ValueError(f"column={column!r} is not a column of the data set: use one of {', '.join(names)}")
        chosen = names[0] if column is None else column
        return chosen, list(self._dataset.with_format(None)[chosen])


class ProgressCallback(_TrainerCallback):  # type: ignore[misc]
    """Moves the schedules of losses during training; without it a schedule stays at its start.

    losses: each an `InfoNCE`, or a loss of this module
    """

    def __init__(self, *losses: nn.Module) -> None:
        self.losses = [part for loss in losses for part in loss.modules() if isinstance(part, InfoNCE)]
        if not self.losses:
            raise ValueError("pass at least one loss of hardneg, such as ProgressCallback(loss)")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for loss in self.losses:
            loss.set_progress(_fraction(state))


class RefreshCallback(_TrainerCallback):  # type: ignore[misc]
    """Encodes the training set and composes batches from it, for the batches of `ProximityBatches`.

    Args:
        every: ``"epoch"``: at the start of every epoch; a number: at the start, and then after every so many steps;
            None: at the start only
        column: whose texts are encoded, by default the first one
        encode: maps the model and a list of texts to embeddings (N, d), by default ``model.encode`` with the prompt of
            the column in the training arguments, normalized
    """

    def __init__(
        self, every: int | str | None = "epoch", column: str | None = None, encode: Encode | None = None
    ) -> None:
        if isinstance(every, str):
            checks.choice("every", every, ("epoch",))
        elif every is not None:
            every = checks.whole("every", every)
        self.every, self.column, self.encode = every, column, encode
        self.refreshes = 0  # so far

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        # A data set that is too small for a graph has none of these samplers either.
        composed = isinstance(args.batch_sampler, ProximityBatches) and not isinstance(loader.dataset, IterableDataset)
        if not composed and not list(_samplers(loader)):
            raise ValueError(
                "RefreshCallback needs batch_sampler=ProximityBatches() in the training arguments, and a data set that "
                "is not streamed"
            )
        if self.every != "epoch":
            self._refresh(args, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every == "epoch":
            self._refresh(args, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for sampler in _samplers(kwargs["train_dataloader"]):
            sampler.set_progress(_fraction(state))
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._refresh(args, **kwargs)

    def _refresh(self, args: Any, *, model: nn.Module, train_dataloader: Any, **_: Any) -> None:
        training = model.training
        try:
            for sampler in _samplers(train_dataloader):
                column, texts = sampler.texts(self.column)
                sampler.refresh(self._encoded(model, args, column, texts))
        finally:
            model.train(training)
        self.refreshes += 1

    def _encoded(self, model: nn.Module, args: Any, column: str, texts: list[str]) -> TensorLike:
        if self.encode is not None:
            return self.encode(model, texts)
        prompt = args.prompts
        if isinstance(prompt, dict):
            if any(isinstance(given, dict) for given in prompt.values()):
                raise ValueError("prompts differ between data sets: pass encode= to RefreshCallback")
            prompt = prompt.get(column)
        found: Tensor = model.encode(  # type: ignore[operator]
            texts,
            batch_size=args.per_device_eval_batch_size,
            prompt=prompt,
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return found


def _samplers(loader: Any) -> Iterator[TextBatchSampler]:
    """The samplers of a training loader, which may share its batches between processes or hold several data sets."""
    found = [getattr(loader, "batch_sampler", None)]
    while found:
        sampler = found.pop()
        if isinstance(sampler, TextBatchSampler):
            yield sampler
        elif sampler is not None:
            found += [getattr(sampler, "batch_sampler", None), *getattr(sampler, "batch_samplers", ())]


def _fraction(state: Any) -> float:
    return min(1.0, float(state.global_step / max(1, state.max_steps)))
