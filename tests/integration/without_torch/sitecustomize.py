"""Makes an interpreter one in which torch is not installed; see the fixture `without_torch`."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
