"""Lightning's loggers by name, writing into the folder of a run."""

from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from hardneg.training import run_folder


def check(name: str) -> None:
    """Raise if the package of this logger is not installed."""
    if name != "csv" and find_spec(name) is None:
        raise ValueError(f"trainer.logger={name} needs a package that is not installed: pip install {name}")


def create(name: str, folder: Path) -> Logger:
    """The logger of this name, which writes to ``logs`` in the folder of the run.

    A resumed run gets a new version in the same folder. ``mlflow`` uses ``MLFLOW_TRACKING_URI`` if it is set, and
    ``wandb`` sends to its server unless ``WANDB_MODE=offline``.
    """
    target = (folder / run_folder.LOGS).absolute()
    if name == "csv":
        return CSVLogger(target.parent, name=target.name)
    if name == "tensorboard":
        return TensorBoardLogger(target.parent, name=target.name, default_hp_metric=False)
    target.mkdir(exist_ok=True)
    if name == "wandb":
        return WandbLogger(name=folder.name, save_dir=target, project="hardneg")
    return MLFlowLogger(experiment_name="hardneg", run_name=folder.name, save_dir=str(target / "mlruns"))
