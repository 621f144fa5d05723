"""The main module: `__main__`, which in a worker is none of the job's.

A pickle that a script has written, of a whole model or of a vocabulary, has the script's own classes as `__main__`'s.
Where the job's file has these it takes them, as `python FILE` does.
"""

from __future__ import annotations

import sys
from types import ModuleType

_standing: list[ModuleType] = []  # those that look in the job's module, too


def look_in(name: str) -> None:
    """What `__main__` has not is looked for in the module of this name, while there is one; until `look_nowhere`."""
    look_nowhere()
    main = sys.modules.get("__main__")
    if main is None or hasattr(main, "__getattr__"):
        return

    def of_job(attribute: str) -> object:
        module = sys.modules.get(name)
        if module is None or attribute.startswith("__") or attribute not in vars(module):
            raise AttributeError(f"module '__main__' has no attribute {attribute!r}")
        return vars(module)[attribute]

    main.__getattr__ = of_job  # type: ignore[method-assign]  # as a module that defines it
    _standing.append(main)


def look_nowhere() -> None:
    while _standing:
        vars(_standing.pop()).pop("__getattr__", None)
