"""The fake front end of the server's tests, and the server process of the end-to-end tests, are used here, too."""

import sys
from pathlib import Path

for folder in ("server", "e2e"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
