"""The head of a report lists what its runs have in common, and several values where they differ."""

import json
import re
from pathlib import Path

import pytest
from insight.folders import make_run

from hardneg.insight.contents import Contents
from hardneg.insight.header import facts
from hardneg.insight.runs import group_runs, read_run


def listed(runs: list[Path]) -> dict[str, str]:
    html = facts(Contents(group_runs([*map(read_run, runs)]), ""))
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)
    return {label: re.sub(r"<[^>]+>", "", value) for label, value in pairs}


def add(run: Path, **entries: object) -> Path:
    file = run / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return run


def test_the_head_lists_encoder_epochs_batch_device_date_and_version(tmp_path: Path) -> None:
    settings = ["encoder.name=tiny", "trainer.batch_size=128"]
    runs = [make_run(tmp_path / str(seed), seed=seed, epochs=9, overrides=settings) for seed in range(2)]
    for run, day in zip(runs, ("2026-02-03", "2026-02-01"), strict=True):
        add(run, started=f"{day}T10:00:00+00:00", hardneg="0.2.0")
    assert listed(runs) == {
        "encoder": "tiny",
        "epochs": "9",
        "batch size": "128",
        "device": "cpu",
        "trained": "2026-02-01 to 2026-02-03",
        "hardneg": "0.2.0",
    }
    assert listed(runs[:1])["trained"] == "2026-02-03"


def test_values_that_differ_are_all_listed_up_to_a_few(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(epochs), epochs=epochs) for epochs in range(1, 8)]
    assert listed(runs[:2])["epochs"] == "1, 2"
    assert listed(runs)["epochs"] == "1, 2, 3, 4, …"


@pytest.mark.parametrize("odd", [None, [], {}, "yesterday", 10**30, "<script>"])
def test_entries_of_another_kind_are_left_out_or_shown_as_text(tmp_path: Path, odd: object) -> None:
    run = add(make_run(tmp_path / "run"), started=odd, hardneg=odd, device=odd)
    assert "trained" not in listed([run])
    html = facts(Contents(group_runs([read_run(run)]), ""))
    assert "<script" not in html
