"""Methods: how encoder, views, memory and loss work together, as LightningModules. `get` finds one by name."""

from importlib import import_module
from typing import TYPE_CHECKING

from hardneg import checks

if TYPE_CHECKING:
    from hardneg.methods.method import Method

DEFAULT = "simclr"  # the method of a recipe that names none
METHODS = {
    "simclr": "hardneg.methods.simclr:SimCLR",
    "moco": "hardneg.methods.moco:MoCo",
    "moco_v3": "hardneg.methods.moco_v3:MoCoV3",
    "instance_discrimination": "hardneg.methods.instance_discrimination:InstanceDiscrimination",
    "cmc": "hardneg.methods.cmc:CMC",
    "local_aggregation": "hardneg.methods.local_aggregation:LocalAggregationMethod",
    "graphcl": "hardneg.methods.graphcl:GraphCL",
    "infograph": "hardneg.methods.infograph:InfoGraph",
    "simcse": "hardneg.methods.simcse:SimCSE",
    "quick_thoughts": "hardneg.methods.quick_thoughts:QuickThoughts",
}


def get(name: str) -> "type[Method]":
    """The method of this name.

    Examples:
        >>> get("moco").Settings().queue
        65536
    """
    checks.choice("method", name, tuple(METHODS))
    module, _, attribute = METHODS[name].partition(":")
    found: type[Method] = getattr(import_module(module), attribute)
    return found
