"""Settings: where the daemon lives and what it may use. Flag, then WEFT_* environment, then weft.toml, then default.

Read once, in the command line's main function, and passed by value from there.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from weft.spec.field_errors import SpecError, explain, shown
from weft.spec.source import check_utf8, home_directory

# HOST:PORT; an IPv6 address may stand in brackets, as in a URL
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*:[^\[\]]*)\]|(?P<host>[^\[\]]*)):(?P<port>[0-9]+)")


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "weft") if base else Path(f"/tmp/weft-{os.getuid()}")


def _default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or home_directory() / ".local/state", "weft")


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home_directory() / ".cache", "weft")


class Settings(BaseModel):
    """workers = 0 means one for each `threads` usable cores. metrics = "" exports nothing. Directories are absolute:
    workers go to those of their jobs."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    runtime_dir: Path = Field(default_factory=_default_runtime_dir, description="sockets and the lock; made 0700")
    state_dir: Path = Field(default_factory=_default_state_dir, description="the ledger, and the log of workers")
    runs_dir: Path | None = Field(default=None, description="run directories; default STATE_DIR/runs")
    cache_dir: Path = Field(
        default_factory=_default_cache_dir, description="what was compiled and inspected, for other jobs to find"
    )
    keep_inspections: bool = Field(
        default=True, description="whether a job that was inspected within a day and has not changed is not once more"
    )
    workers: int = Field(default=0, ge=0, le=1024, description="CPU workers")
    stand_ins: int = Field(
        default=0,
        ge=0,
        le=64,
        description="GPU workers that compute on the CPU: to try GPU strategies without a GPU",
    )
    gpus: int | None = Field(
        default=None, ge=0, le=64, description="GPUs to use, each by a worker; unset, all, or none beside stand-ins"
    )
    loaders: int = Field(
        default=1, ge=1, le=1024, description="workers that load data; at least one for each of the others"
    )
    threads: int = Field(default=1, ge=1, le=1024, description="compute threads (and cores) of each CPU worker")
    metrics: str = Field(
        default="127.0.0.1:9464", description="HOST:PORT of the timeline page and /metrics; 0 picks one"
    )
    accounting: bool = Field(
        default=True, description="whether lanes stamp where their time goes; false only to measure it"
    )
    max_queued: int = Field(default=1000, ge=1, description="jobs that wait, run or are paused; one more is refused")
    drain_seconds: float = Field(default=20.0, gt=0, allow_inf_nan=False, description="budget of a drain after SIGTERM")

    @field_validator("workers", "stand_ins", "gpus", "loaders", "threads", "max_queued", "drain_seconds", mode="before")
    @classmethod
    def _is_no_truth(cls, value: object) -> object:
        if isinstance(value, bool):  # which pydantic takes for 0 and 1
            raise PydanticCustomError("int_type", "true and false are no numbers")
        return value

    @field_validator("runtime_dir", "state_dir", "runs_dir", "cache_dir")
    @classmethod
    def _is_a_path(cls, value: Path | None) -> Path | None:
        if value is not None and "\0" in str(value):
            raise ValueError(f"{str(value)!r:.80} holds a NUL, which no path does; write another")
        try:
            path = value and value.absolute()
        except FileNotFoundError as error:
            raise ValueError(f"{value} stands in a directory that is gone; write an absolute path") from error
        check_utf8(str(path))
        return path

    @field_validator("metrics")
    @classmethod
    def _metrics_is_an_address(cls, value: str) -> str:
        address = _ADDRESS.fullmatch(value)
        if value and not (address and int(address["port"]) < 2**16):
            raise ValueError(
                f"{value!r:.80} is not HOST:PORT; write for example '127.0.0.1:9464', or '' for no metrics"
            )
        return value

    @property
    def socket_path(self) -> Path:
        return self.runtime_dir / "weft.sock"

    @property
    def runs_path(self) -> Path:
        return self.runs_dir or self.state_dir / "runs"

    @property
    def compiled_path(self) -> Path:
        return self.cache_dir / "compiled"

    @property
    def caches(self) -> dict[str, str | None]:
        """As a worker is told of them."""
        inspections = str(self.cache_dir / "inspections") if self.keep_inspections else None
        return {"compiled": str(self.compiled_path), "inspections": inspections}

    def num_workers(self, cores: int) -> int:
        """CPU workers on so many cores, of which stand-ins take their part."""
        return self.workers or max(1, cores // self.threads - self.stand_ins)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        address = _ADDRESS.fullmatch(self.metrics)
        return address and (address["ipv6"] or address["host"] or "127.0.0.1", int(address["port"]))


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Merges the three sources; raises SpecError that names the source, the field and the remedy.

    `file` is weft.toml's path (its values under `[daemon]`); None looks for ./weft.toml and takes none if absent.
    Flags whose value is None do not count.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = file or Path("weft.toml")
    if file is not None or path.is_file():
        values |= _daemon_table(path)
        sources |= {name: f"{path}: {name}" for name in values}
    for name in Settings.model_fields:
        variable = f"WEFT_{name.upper()}"
        if variable in environment:
            values[name], sources[name] = environment[variable], variable
    for name, value in flags.items():
        if value is not None:
            values[name], sources[name] = value, f"--{name.replace('_', '-')}"
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SpecError(explain(error, Settings, lambda name: sources.get(name, f"settings: {name}"))) from None


def _daemon_table(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = error.strerror or "not a file"
        raise SpecError(f"{path}: cannot be read ({problem}); make it readable, or give another by --config") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: cannot be read as TOML: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise SpecError(f"{path}: cannot be read as TOML: {problem}; mend it, or give another by --config") from None
    if unknown := sorted(set(tables) - {"daemon"}):
        raise SpecError(f"{path}: {unknown[0]!r:.80}: unknown key; the settings stand under [daemon]")
    table = tables.get("daemon", {})
    if not isinstance(table, dict):
        raise SpecError(
            f"{path}: daemon: {shown(table)} is no table; write [daemon] on a line and the settings below it"
        )
    return table
