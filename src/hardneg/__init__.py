"""hardneg: choose the negatives of contrastive learning."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from hardneg.public import *  # noqa: F403 (what it names in __all__)
else:
    # Imported at first use, so that the command line starts fast and handles Ctrl-C while torch is imported.
    def __getattr__(name: str) -> Any:
        if not name.startswith("_") and importlib.util.find_spec(f"hardneg.{name}"):
            return importlib.import_module(f"hardneg.{name}")
        public = importlib.import_module("hardneg.public")
        if name != "__all__" and name not in public.__all__:
            near = importlib.import_module("hardneg.spelling").nearest(name, public.__all__)
            remedy = f": did you mean hardneg.{near}?" if near else ""
            raise AttributeError(f"module 'hardneg' has no attribute {name!r}{remedy}")
        # All names together: later lookups do not call this, and eval(repr(schedule), vars(hardneg)) finds every name.
        globals().update({public_name: getattr(public, public_name) for public_name in public.__all__})
        return getattr(public, name)

    def __dir__() -> list[str]:
        return [*globals(), *importlib.import_module("hardneg.public").__all__]
