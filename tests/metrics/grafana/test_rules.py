"""Recording rules and alerts ask for what is declared, and each alert has a test that promtool runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.metrics.grafana.queries import check_query, exported
from weft.metrics.grafana.rules import ALERTS, RECORDINGS, Alert, RecordingRule, check_rules, families

FOLDER = Path(__file__).parents[3] / "observability" / "prometheus"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def test_rules_ask_for_what_is_declared_or_recorded() -> None:
    check_rules()


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.record)
def test_the_level_of_a_recording_names_its_labels(recording: RecordingRule) -> None:
    level, metric, operation = recording.record.split(":")
    assert recording.labels == set(level.split("_"))
    assert metric.startswith("weft_")
    assert operation
    assert recording.labels <= check_query(recording.expression, families())


def test_every_recording_is_used_by_a_rule_or_a_board() -> None:
    used = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (*FOLDER.parent.rglob("*.json"), FOLDER / "alerts.yml", FOLDER / "rules.yml")
    )
    for recording in RECORDINGS:
        assert used.count(recording.record) > 1, recording.record


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_what_is_wrong_and_what_to_do(alert: Alert) -> None:
    assert alert.severity in ("critical", "warning", "info")
    assert alert.summary.endswith(".")
    assert alert.remedy.endswith(".")
    labels = check_query(alert.expression, families())
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= labels


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS] + [recording.record for recording in RECORDINGS])
def test_every_rule_is_in_a_test_of_promtool(name: str) -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*_test.yml"))
    assert name in tests


def test_the_shipped_configuration_keeps_a_jobs_own_label() -> None:
    assert "honor_labels: true" in (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    assert "job" in exported()["weft_job_step"]


@needs_promtool
def test_promtool_finds_no_fault_in_configuration_and_rules_and_their_tests_pass() -> None:
    commands = [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml", "alerts.yml"],
        ["test", "rules", *sorted(path.name for path in FOLDER.glob("*_test.yml"))],
    ]
    for command in commands:
        done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
