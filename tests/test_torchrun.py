"""The documented commands for several machines, run as two agents with one process each on one machine."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import hardneg as hn

pytest.importorskip("lightning")
# Eight agents and their processes import torch one after the other: a minute.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
RENDEZVOUS = {
    "c10d": "--rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint node0:29500",
    "numbered": "--node-rank {node} --master-addr node0 --master-port 29500",
}


def documented(page: str, after: str) -> str:
    """The first Python block below a heading."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {after}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def on_two_nodes(rendezvous: str, command: list[str], folders: list[Path]) -> list[str]:
    """Start an agent with one process in each folder, as on two machines, and return what each wrote to stderr."""
    port, agents = free_port(), []
    for node, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        where = RENDEZVOUS[rendezvous].format(node=node).replace("node0", "localhost").replace("29500", str(port))
        if rendezvous == "c10d":  # on one machine both agents would be node0
            where += f" --rdzv-conf is_host={1 - node}"
        # No pipe: a full one would stop an agent whose output is not read yet.
        with (folder / "stderr").open("wb") as stderr:
            agents.append(
                subprocess.Popen(
                    [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *where.split(), *command],
                    cwd=folder,
                    env={
                        **os.environ,
                        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
                        "OMP_NUM_THREADS": "1",
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                )
            )
    deadline = time.monotonic() + children.LIMIT
    try:
        # An agent whose process failed ends at once, and the other would wait five minutes for it.
        while None in (ended := [agent.poll() for agent in agents]) and not any(ended) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:  # also when the limit of the whole test ends this one
        for agent in agents:
            children.kill(agent.pid)  # with its process, which is in a session of its own
            agent.wait(timeout=10)
    errors = [(folder / "stderr").read_text(encoding="utf-8", errors="replace") for folder in folders]
    assert ended == [0, 0], f"agents ended with {ended} (None: waited for the other):\n" + "\n".join(errors)
    return errors


def single_process() -> tuple[list[float], dict[str, Tensor], Tensor]:
    """The script's three steps by one process, each on the whole batch: losses, weights, temperature."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    log_temperature = torch.tensor(0.5).log().requires_grad_()
    losses = []
    for view1, view2 in torch.randn(3, 2, 128, 32):
        value = hn.hcl(beta=1.0, tau_plus=0.1)(network(view1), network(view2), scale=(-log_temperature).exp())
        parameters = [*network.parameters(), log_temperature]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                parameter -= gradient
        losses.append(value.item())
    return losses, network.state_dict(), log_temperature.detach()


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_two_nodes_train_by_the_documented_script_as_one_process_does(rendezvous: str, tmp_path: Path) -> None:
    text = (DOCS / "distributed.md").read_text(encoding="utf-8")
    assert f"torchrun --nnodes 2 --nproc-per-node 8 {RENDEZVOUS[rendezvous].format(node=0)} train.py" in text
    (tmp_path / "train.py").write_text(documented("distributed.md", "Several machines"), encoding="utf-8")
    on_two_nodes(rendezvous, [str(tmp_path / "train.py")], folders := [tmp_path / "0", tmp_path / "1"])
    written = [folder for folder in folders if (folder / "trained.pt").exists()]
    assert len(written) == 1
    if rendezvous == "numbered":
        assert written == folders[:1]
    found = torch.load(written[0] / "trained.pt", weights_only=True)
    losses, weights, log_temperature = single_process()
    # The steps have length 1: weights that agree after them, and a loss at each, are gradients that agree.
    assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-6, atol=0)
    assert_close(found["encoder"], weights, rtol=1e-5, atol=1e-6)
    assert abs(log_temperature.exp() - 0.5) > 0.01
    assert_close(found["loss"]["temperature.log_value"], log_temperature, rtol=1e-5, atol=1e-6)


def test_two_nodes_train_a_recipe_to_the_weights_of_one_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from hardneg.training import recipe, run

    settings = ["trainer.epochs=1", "trainer.accelerator=cpu", "trainer.knn_every=0", "trainer.batch_size=512",
                "encoder.name=processes:plain_encoder", "encoder.options={}", "encoder.norm=false"]  # fmt: skip
    run.train(recipe.load(recipe.find("digits-simclr"), settings), tmp_path / "alone")
    command = ["-m", "--", "hardneg", "train", "digits-simclr", "trainer.nodes=2", *settings]
    errors = on_two_nodes("numbered", [*command, "--run", "run"], [tmp_path / "0", tmp_path / "1"])
    assert not (tmp_path / "1" / "run").exists()
    assert (tmp_path / "0" / "run" / "evaluation.json").exists()
    assert "not evaluated" not in "".join(errors)  # by the second, which has nothing to evaluate
    together, one = (load_file(tmp_path / name / "encoder.safetensors") for name in ("0/run", "alone"))
    assert_close(together, one, rtol=1e-5, atol=1e-5)


def test_more_processes_than_the_recipe_states_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hardneg.training import recipe, run

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun started 2 processes, but trainer.devices=1 and trainer.nodes=1"):
        run.train(recipe.load({}, ["trainer.accelerator=cpu"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


LIGHTNING = """
import sys
import time
import cached_processes
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
module = Large(cached_processes.Model().first, chunk_size=3).double()
# One sample after the other goes to the processes in turn.
loader = DataLoader(TensorDataset(*cached_processes.batch()), batch_size=13)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", num_nodes=2, devices=1, strategy="ddp", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, loader)
if trainer.is_global_zero:
    torch.save(module.state_dict(), "trained.pt")
time.sleep(1)  # as docs/distributed.md says
"""


def test_the_documented_lightning_module_trains_on_two_nodes_as_one_process_on_the_whole_batch(tmp_path: Path) -> None:
    import cached_processes

    (tmp_path / "train.py").write_text(documented("large-batches.md", "Lightning") + LIGHTNING, encoding="utf-8")
    on_two_nodes("numbered", [str(tmp_path / "train.py")], [tmp_path / "0", tmp_path / "1"])
    found: dict[str, Any] = torch.load(tmp_path / "0" / "trained.pt", weights_only=True)
    encoder, loss = cached_processes.Model().first, hn.InfoNCE(hn.Learnable(0.1)).double()
    optimizer = torch.optim.SGD([*encoder.parameters(), *loss.parameters()], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(*map(encoder, cached_processes.batch())).backward()
        optimizer.step()
    expected = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    expected["loss.temperature.log_value"] = loss.temperature.log_value.detach()  # type: ignore[union-attr]
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
