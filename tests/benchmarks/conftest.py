"""The modules of benchmarks/ import one another by name, as scripts of one folder do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
