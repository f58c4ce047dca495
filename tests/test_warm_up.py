"""`hardneg doctor --warm` calls every preset once, and says in one line where it cannot. The CPU acts as the GPU."""

import json
from collections.abc import Callable

import pytest
import torch
from test_cli import hardneg

from hardneg import cli, public, warm_up
from hardneg.losses import kernels
from hardneg.losses.infonce import InfoNCE
from hardneg.training import objectives

SMALL = ["doctor", "--warm", "--batch-size", "12", "--dim", "8"]


@pytest.fixture(autouse=True)
def _warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.warnings, "showwarning", cli.warnings.showwarning)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU."""
    monkeypatch.setattr(warm_up, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(warm_up, "ROWS", 20)


def test_every_preset_of_infonce_is_warmed_up() -> None:
    assert set(warm_up.names()) == set(objectives.names()) - {"infograph"}  # which has no fused kernel
    assert all(hasattr(public, name) for name in warm_up.names())


def test_every_preset_is_called_forward_and_backward_in_each_dtype(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = InfoNCE.forward

    def forward(self: InfoNCE, z1: torch.Tensor, z2: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        assert z1.shape == z2.shape == (12, 8)
        z1.register_hook(lambda gradient: calls.append((z1.dtype, bool(gradient.any()))))
        return original(self, z1, z2, **given)

    monkeypatch.setattr(InfoNCE, "forward", forward)
    found = list(warm_up.warm_up(12, 8))
    assert [(each.preset, each.dtype) for each in found] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in warm_up.names()
    ]
    assert [each.error for each in found] == [""] * len(found)
    assert all(each.seconds > 0 for each in found)
    assert calls == [(dtype, True) for dtype in warm_up.DTYPES for _ in warm_up.names()]


def test_the_command_prints_the_seconds_of_each_preset(gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = hardneg(capsys, *SMALL)
    assert code == 0, err
    for name in warm_up.names():
        assert name in out
    assert "bfloat16" in out
    code, out, _ = hardneg(capsys, *SMALL, "--json")
    assert code == 0
    assert {entry["preset"] for entry in json.loads(out)} == set(warm_up.names())


def test_a_preset_that_fails_does_not_stop_the_others(
    gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> InfoNCE:
        raise RuntimeError("no\nregisters")

    monkeypatch.setattr(warm_up.presets, "hcl", broken)
    monkeypatch.setattr(warm_up, "names", lambda: ["simclr", "hcl", "moco"])
    code, out, _ = hardneg(capsys, *SMALL)
    assert code == 1
    assert "RuntimeError: no registers" in out
    assert "moco" in out


NO_GPU: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no GPU": (lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False), "torch finds none"),
    "no Triton": (lambda patch: patch.setattr(warm_up, "find_spec", lambda name: None), "pip install triton"),
    "an old GPU": (lambda patch: patch.setattr(kernels, "runs_fused", lambda device: False), "Old has no bfloat16"),
}


@pytest.mark.parametrize("case", NO_GPU)
def test_without_a_gpu_for_the_kernels_one_line_says_why(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    monkeypatch.setattr(warm_up, "find_spec", lambda name: name)
    change, message = NO_GPU[case]
    change(monkeypatch)
    code, out, err = hardneg(capsys, *SMALL)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "64"], "--batch-size and --dim belong to --warm"),
        (["--dim", "64"], "--batch-size and --dim belong to --warm"),
        (["--warm", "--batch-size", "1"], "--batch-size"),
        (["--warm", "--dim", "0"], "--dim"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    arguments: list[str], message: str, gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = hardneg(capsys, "doctor", *arguments)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert message in err
