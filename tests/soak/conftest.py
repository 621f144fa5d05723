"""The modules of this folder import one another by name, as scripts of one folder do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
