"""Batches of similar texts and the callbacks, in the real trainer of sentence-transformers."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from integrations.tiny_model import WORDS, sentences, tiny_model
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch.testing import assert_close
from transformers import TrainerCallback

import hardneg as hn
from hardneg.integrations.sentence_transformers import (
    CachedHardNegativeLoss,
    HardNegativeLoss,
    ProgressCallback,
    ProximityBatches,
    RefreshCallback,
)

ROWS, BATCH = 50, 8


def pairs(rows: int = ROWS, seed: int = 0, columns: tuple[str, ...] = ("anchor", "positive")) -> Dataset:
    texts = sentences(len(columns) * rows, seed)
    return Dataset.from_dict({name: texts[place :: len(columns)] for place, name in enumerate(columns)})


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the training loader, and the mode of the model at every step."""

    loader: Any = None

    def __init__(self) -> None:
        self.training: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loader = kwargs["train_dataloader"]
        self.training.append(kwargs["model"].training)


def trainer(
    folder: Path, model: SentenceTransformer, loss: Any, data: Any, callbacks: Any = (), **options: Any
) -> SentenceTransformerTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    evaluation = options.pop("eval_dataset", None)
    args = SentenceTransformerTrainingArguments(str(folder / "out"), **(settings | options))
    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=evaluation, loss=loss, callbacks=list(callbacks)
    )


def losses_of(run: SentenceTransformerTrainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


SLOW = pytest.mark.slow
KINDS = ["plain", *[pytest.param(kind, marks=SLOW) for kind in ("cached", "matryoshka", "accumulated")]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_lowers_the_loss(tmp_path: Path, kind: str) -> None:
    model = tiny_model(tmp_path / "model")
    loss: Any = HardNegativeLoss(model, hn.hcl(0.5, 0.0, 0.1, in_batch="other"))
    if kind == "cached":
        loss = CachedHardNegativeLoss(model, hn.simcse(hn.Learnable(0.1)), mini_batch_size=3)
    if kind == "matryoshka":
        loss = MatryoshkaLoss(model, loss, [16, 8])
    options = {"gradient_accumulation_steps": 2} if kind == "accumulated" else {}
    data = pairs(columns=("anchor", "positive", "negative_1", "negative_2"))
    run = trainer(tmp_path, model, loss, data, num_train_epochs=6, learning_rate=1e-2, **options)
    run.train()
    logged = losses_of(run)
    assert sum(logged[-5:]) < 0.8 * sum(logged[:5])


def test_parts_of_the_loss_are_logged(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run = trainer(tmp_path, model, HardNegativeLoss(model, symmetric=True, parts=True), pairs())
    run.train()
    entry = run.state.log_history[0]
    assert entry["query_to_doc"] > 0
    assert entry["query_to_doc"] + entry["doc_to_query"] == pytest.approx(entry["loss"], abs=1e-3)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=SLOW)])
def test_batches_of_the_trainer_are_composed_by_proximity(tmp_path: Path, workers: int) -> None:
    model, recorder = tiny_model(tmp_path / "model"), Recorder()
    topics = [f"{WORDS[row % 5]} {WORDS[row % 5]} {WORDS[5 + row % 35]}" for row in range(200)]
    data = Dataset.from_dict({"anchor": topics, "positive": sentences(200)})
    # One-hot vectors of the first word: neighbors have the same topic.
    refresh = RefreshCallback(
        encode=lambda model, texts: torch.nn.functional.one_hot(
            torch.tensor([int(text.split()[0][1:]) for text in texts])
        ).float()
    )
    batches = ProximityBatches(candidates=199, neighbors=30, restart=1.0, coverage="walk")
    run = trainer(
        tmp_path, model, HardNegativeLoss(model), data, [refresh, recorder], batch_sampler=batches,
        num_train_epochs=2, dataloader_num_workers=workers,
    )  # fmt: skip
    run.train()
    assert refresh.refreshes == 2
    assert recorder.training == [True] * 50
    sampler = recorder.loader.batch_sampler
    drawn = [batch for batch in sampler]
    assert [len({row % 5 for row in batch}) for batch in drawn] == [1] * 25
    uniform = batches(data, BATCH, False, seed=3)
    assert sum(len({row % 5 for row in batch}) > 1 for batch in uniform) == 25


def test_each_row_is_drawn_once_in_an_epoch_and_batches_change_with_the_epoch() -> None:
    data = pairs()
    sampler = ProximityBatches(candidates=1000, neighbors=100)(data, BATCH, False, ["label"], seed=1)
    assert sampler.candidates == ROWS - 1  # type: ignore[attr-defined]
    sampler.refresh(torch.nn.functional.normalize(torch.randn(ROWS, 4)))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    for batches in epochs:
        assert len(batches) == len(sampler) == 7
        assert sorted(row for batch in batches for row in batch) == list(range(ROWS))
    assert epochs[0] != epochs[1]


def test_the_seed_is_drawn_from_the_generator_of_the_trainer() -> None:
    def orders(seed: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(seed)
        return [list(ProximityBatches()(pairs(), BATCH, False, generator=generator, seed=0)) for _ in range(2)]

    first, second = orders(1)
    assert first != second  # two data sets of one training
    assert orders(1) == [first, second]
    assert orders(2) != [first, second]


def test_evaluation_leaves_the_training_batches_alone(tmp_path: Path) -> None:
    model, recorder, refresh = tiny_model(tmp_path / "model"), Recorder(), RefreshCallback(every=3)
    made: list[Any] = []
    batches = ProximityBatches(restart=0.5)

    def factory(*args: Any, **kwargs: Any) -> Any:
        made.append(batches(*args, **kwargs))
        return made[-1]

    run = trainer(
        tmp_path, model, HardNegativeLoss(model), pairs(), [refresh, recorder], batch_sampler=factory,
        eval_dataset=pairs(3, seed=9), eval_strategy="steps", eval_steps=2, num_train_epochs=2,
    )  # fmt: skip
    run.train()
    train, *evaluation = made
    assert len(evaluation) >= 6  # a new one for every evaluation
    assert train is recorder.loader.batch_sampler
    assert train.refreshes == refresh.refreshes == 1 + 14 // 3
    assert {sampler.refreshes for sampler in evaluation} == {0}
    assert all("eval_loss" not in entry or entry["eval_loss"] > 0 for entry in run.state.log_history)


def test_every_data_set_of_a_training_has_its_own_graph(tmp_path: Path) -> None:
    model, recorder, refresh = tiny_model(tmp_path / "model"), Recorder(), RefreshCallback(every=None)
    data = DatasetDict({"one": pairs(40), "two": pairs(30, seed=3, columns=("question", "answer", "wrong"))})
    run = trainer(tmp_path, model, HardNegativeLoss(model), data, [refresh, recorder], batch_sampler=ProximityBatches())
    run.train()
    found = recorder.loader.batch_sampler.batch_samplers
    assert [sampler.size for sampler in found] == [40, 30]
    assert [sampler.refreshes for sampler in found] == [1, 1]
    assert run.state.global_step == 5 + 4


def test_a_saved_training_can_be_resumed(tmp_path: Path) -> None:
    def run(resume: bool) -> list[float]:
        model = tiny_model(tmp_path / "model")
        callbacks = [RefreshCallback(every=None, encode=lambda model, texts: torch.eye(len(texts)))]
        made = trainer(
            tmp_path, model, HardNegativeLoss(model), pairs(), callbacks, batch_sampler=ProximityBatches(restart=0.5),
            num_train_epochs=2, save_strategy="steps", save_steps=4,
        )  # fmt: skip
        made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4") if resume else None)
        return losses_of(made)

    whole = run(resume=False)
    assert_close(torch.tensor(run(resume=True)), torch.tensor(whole), rtol=0, atol=2e-4)


def test_schedules_move_with_the_training(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    loss = HardNegativeLoss(model, hn.simcse(hn.Linear(0.2, 0.1)))
    seen: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(loss.loss.progress)

    trainer(tmp_path, model, loss, pairs(40), [ProgressCallback(loss), Watch()]).train()
    assert seen == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def test_the_factory_can_be_pickled_with_the_training_arguments() -> None:
    batches = pickle.loads(pickle.dumps(ProximityBatches(restart=0.3)))
    assert repr(batches) == repr(ProximityBatches(restart=0.3))


def test_a_prompt_is_used_to_encode(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    recorder, data = Recorder(), pairs()
    run = trainer(
        tmp_path, model, HardNegativeLoss(model), data, [RefreshCallback(every=None), recorder], learning_rate=0.0,
        batch_sampler=ProximityBatches(candidates=49, neighbors=3, weighted=True), prompts={"anchor": "w1 w2 "},
    )  # fmt: skip
    run.train()
    with_prompt = torch.as_tensor(model.encode(data["anchor"], prompt="w1 w2 ", normalize_embeddings=True))
    expected = hn.ProximityGraph.build(with_prompt, 49, 3).neighbors
    assert bool((recorder.loader.batch_sampler.graph.neighbors == expected).all())
    plain = torch.as_tensor(model.encode(data["anchor"], normalize_embeddings=True))
    assert not bool((hn.ProximityGraph.build(plain, 49, 3).neighbors == expected).all())


def test_mistakes_give_one_line(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match="neighbors=10 must be ≤ candidates=5"):
        ProximityBatches(candidates=5, neighbors=10)
    with pytest.raises(ValueError, match="every='step' is not known"):
        RefreshCallback(every="step")
    with pytest.raises(ValueError, match="pass at least one loss of hardneg"):
        ProgressCallback(model)
    with pytest.raises(ValueError, match="needs batch_sampler=ProximityBatches"):
        trainer(tmp_path, model, HardNegativeLoss(model), pairs(), [RefreshCallback()]).train()
    wrong = trainer(
        tmp_path, model, HardNegativeLoss(model), pairs(), [RefreshCallback(column="title")],
        batch_sampler=ProximityBatches(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="column='title' is not a column of the data set: use one of anchor, positive"):
        wrong.train()


def test_a_data_set_of_one_row_has_one_batch(tmp_path: Path) -> None:
    assert list(ProximityBatches()(pairs(1), BATCH, False)) == [[0]]
    model = tiny_model(tmp_path / "model")
    run = trainer(
        tmp_path, model, HardNegativeLoss(model), pairs(1), [RefreshCallback()], batch_sampler=ProximityBatches()
    )
    run.train()
    assert losses_of(run) == [0.0]


def test_a_data_set_smaller_than_a_batch_has_none_if_the_last_is_dropped(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run = trainer(
        tmp_path, model, HardNegativeLoss(model), pairs(), [RefreshCallback()], batch_sampler=ProximityBatches(),
        eval_dataset=pairs(3, seed=9), eval_strategy="epoch", dataloader_drop_last=True,
    )  # fmt: skip
    run.train()
    assert run.state.global_step == ROWS // BATCH
    sampler = ProximityBatches()(pairs(3), BATCH, True)
    assert (len(sampler), list(sampler)) == (0, [])  # type: ignore[arg-type]


def test_streamed_data_cannot_be_encoded_for_a_graph(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run = trainer(
        tmp_path, model, HardNegativeLoss(model), pairs().to_iterable_dataset(), [RefreshCallback()], max_steps=2,
        batch_sampler=ProximityBatches(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="and a data set that is not streamed"):
        run.train()
