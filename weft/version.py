"""The version of Weft, as `pyproject.toml` has it."""

__version__ = "0.1.0"
