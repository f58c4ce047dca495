"""Property tests draw the same examples every time, so that a red test means a change; `make test-all` draws afresh."""

import os

from hypothesis import settings

settings.register_profile("steady", derandomize=True, database=None)
settings.register_profile("fresh")
settings.load_profile("fresh" if os.environ.get("HARDNEG_FRESH_EXAMPLES") else "steady")
