"""Loading of the state that a loss adds to the state dict of the model it is part of."""

import warnings
from typing import Any

from torch import nn


class LenientState(nn.Module):
    """A module that keeps its current state, with a warning, if a state dict does not contain it.

    Checkpoints of a model from before the loss was added, or before it had this state, then load with ``strict=True``.
    """

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        if missing:
            warnings.warn(
                f"the state dict has no {', '.join(missing)}: {type(self).__name__} keeps its current state",
                stacklevel=2,
            )
