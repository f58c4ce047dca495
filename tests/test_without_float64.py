"""Apple's devices have no float64: nothing that runs on the training device may make one there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this PyTorch has no devices made in Python", allow_module_level=True)
pytest.importorskip("lightning")
pytest.importorskip("torch_geometric", reason="the views of graphs are among the cases")


@pytest.mark.slow
def test_nothing_makes_float64_on_a_device_without_it() -> None:
    # A process of its own: the emulated device is there until the process ends.
    command = [sys.executable, str(Path(__file__).with_name("without_float64.py"))]
    done = subprocess.run(command, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    found = json.loads(done.stdout)
    assert found["cases"] > 30
    assert not found["failures"], "\n".join(f"{name}: {lines}" for name, lines in found["failures"].items())
