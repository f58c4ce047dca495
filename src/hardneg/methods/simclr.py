"""SimCLR: two views of each picture, one encoder, negatives from the batch. Any objective."""

from torch import Tensor

from hardneg.methods.method import Method


class SimCLR(Method):
    """Trains an encoder so that two views of a picture agree (Chen et al. 2020), with any `InfoNCE`."""

    def loss(self, seen: Tensor, index: Tensor, labels: Tensor | None) -> Tensor:
        z1, z2 = self.head(self.encoder(seen)).chunk(2)
        self.note(index, z1)
        extra = {} if labels is None else {"labels": labels}
        loss: Tensor = self.objective(z1, z2, **extra)
        return loss
