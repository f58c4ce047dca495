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
    """The logger of this name (one of `recipe.LOGGERS`), which writes to ``logs`` in the folder of the run

    A resumed run gets a new version in the same place. ``mlflow`` follows ``MLFLOW_TRACKING_URI`` if it is set, and
    ``wandb`` sends to its server unless ``WANDB_MODE=offline``.
    """
    place = (folder / run_folder.LOGS).absolute()
    if name == "csv":
        return CSVLogger(place.parent, name=place.name)
    if name == "tensorboard":
        return TensorBoardLogger(place.parent, name=place.name, default_hp_metric=False)
    place.mkdir(exist_ok=True)
    if name == "wandb":
        return WandbLogger(name=folder.name, save_dir=place, project="hardneg")
    return MLFlowLogger(experiment_name="hardneg", run_name=folder.name, save_dir=str(place / "mlruns"))
