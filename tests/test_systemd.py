"""The systemd units: every setting that Weft needs of them is there, and systemd itself has nothing to say."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from weft.spec.settings import Settings
from weft.transport.wire.runtime_directory import SOCKET_NAME

UNITS = Path(__file__).parents[1] / "systemd"
SERVICES = ("weft.service", "weft@.service")
SOCKETS = ("weft.socket", "weft@.socket")
MAX_EXPOSURE = 25  # tenths: 2.5, the bar with GPU access
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings_of(unit: str) -> dict[str, list[str]]:
    """Every value of every key, in order; Environment is split into `Environment:NAME` keys."""
    settings: defaultdict[str, list[str]] = defaultdict(list)
    for line in (UNITS / unit).read_text(encoding="utf-8").splitlines():
        if not line.startswith(("#", "[")) and line:
            key, _, value = line.partition("=")
            if key == "Environment":
                for pair in value.split():
                    name, _, text = pair.partition("=")
                    settings[f"Environment:{name}"].append(text)
            else:
                settings[key].append(value)
    return settings


@pytest.mark.parametrize("unit", SERVICES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("KillMode", "mixed"),
        ("OOMPolicy", "continue"),
        ("LimitMEMLOCK", "infinity"),
        ("Restart", "on-failure"),
        ("NoNewPrivileges", "yes"),
        ("RuntimeDirectoryMode", "0700"),
        ("StateDirectoryMode", "0700"),
        ("ExecStart", "/usr/bin/env weft daemon"),
        ("ExecReload", "/usr/bin/env weft daemon --replace"),
    ],
)
def test_a_service_has_what_the_daemon_needs(unit: str, key: str, value: str) -> None:
    assert settings_of(unit)[key] == [value]


@pytest.mark.parametrize("unit", SERVICES)
def test_a_service_waits_longer_than_the_drain_takes(unit: str) -> None:
    settings = settings_of(unit)
    assert int(settings["TimeoutStopSec"][0]) > Settings().drain_seconds
    assert int(settings["WatchdogSec"][0]) > 0


@pytest.mark.parametrize(("unit", "name"), [("weft", "weft"), ("weft@", "weft/%i")])
def test_the_daemon_is_told_the_directories_that_systemd_makes_and_its_socket_is_in_one(unit: str, name: str) -> None:
    service, control = settings_of(f"{unit}.service"), settings_of(f"{unit}.socket")
    assert (service["RuntimeDirectory"], service["StateDirectory"]) == ([name], [name])
    assert service["Environment:WEFT_RUNTIME_DIR"] == [f"%t/{name}"]
    assert service["Environment:WEFT_STATE_DIR"] == [f"%S/{name}"]
    assert control["ListenStream"] == [f"%t/{name}/{SOCKET_NAME}"]
    # Without it, stopping the service would remove the socket that the socket unit goes on listening at.
    assert service["RuntimeDirectoryPreserve"] == ["yes"]


@pytest.mark.parametrize("unit", SOCKETS)
def test_a_socket_is_for_its_owner_alone(unit: str) -> None:
    assert settings_of(unit)["SocketMode"] == ["0600"]


def test_the_system_socket_belongs_to_the_user_of_the_instance() -> None:
    assert settings_of("weft@.socket")["SocketUser"] == ["%i"]
    assert settings_of("weft@.service")["User"] == ["%i"]


def test_the_hardened_unit_leaves_open_what_training_needs() -> None:
    settings = settings_of("weft@.service")
    assert {"char-nvidia rw", "char-nvidia-frontend rw"} <= set(settings["DeviceAllow"])
    assert settings["SystemCallFilter"] == ["@system-service", "~@privileged", "pidfd_getfd"]
    assert not settings.keys() & {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateNetwork", "ProcSubset"}


def analyze(*arguments: str, runtime_dir: Path) -> subprocess.CompletedProcess[str]:
    # A user unit is verified against a user's manager, which wants a runtime directory.
    return subprocess.run(
        ["systemd-analyze", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime_dir), "SYSTEMD_COLORS": "0"},
    )


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES + SOCKETS)
def test_systemd_finds_no_fault_in_a_unit(unit: str, tmp_path: Path) -> None:
    scope = ["--system"] if "@" in unit else ["--user"]
    done = analyze("verify", "--man=no", *scope, str(UNITS / unit), runtime_dir=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_the_system_unit_is_hardened_beyond_the_bar(tmp_path: Path) -> None:
    threshold = f"--threshold={MAX_EXPOSURE}"
    unit = str(UNITS / "weft@.service")
    done = analyze("security", "--offline=yes", "--no-pager", threshold, unit, runtime_dir=tmp_path)
    assert done.returncode == 0, done.stdout
