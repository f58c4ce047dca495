"""The callback that sets the learning rate after a resume."""

import lightning as L
from torch.optim.lr_scheduler import LambdaLR


class ResumedLearningRate(L.Callback):
    """Sets the learning rate of the first step after a resume, computed with the current number of epochs.

    The checkpoint holds the rate computed with the number of epochs of the interrupted run.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            if isinstance(scheduler, LambdaLR):
                factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
                scheduler._last_lr = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
                for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                    group["lr"] = rate
