"""Rules for Prometheus: what several panels share is recorded once, and what somebody has to act on is an alert.

The names of recordings are level:metric:operation, as Prometheus's documentation has it; the level is their labels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Final

from weft.metrics.grafana.queries import check_query, exported

MADE_BY: Final = (
    "# Made by `python -m weft.metrics.grafana --write observability` from weft/metrics/grafana/rules.py.\n"
)
INTERVAL: Final = "15s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    record: str  # begins with its labels
    expression: str
    labels: frozenset[str]  # those of its series beside none


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expression: str
    holds: str  # for how long the expression must hold
    severity: str
    summary: str
    remedy: str  # what whoever is woken should do


def _recording(record: str, expression: str) -> RecordingRule:
    level = record.partition(":")[0].split("_")
    return RecordingRule(record=record, expression=dedent(expression).strip(), labels=frozenset(level))


RECORDINGS: Final = (
    _recording(
        "instance_job_mode:weft_compute:share1m",
        """
        sum by (instance, job, mode) (rate(weft_lane_seconds_total{lane=~"compute.*"}[1m]))
          / ignoring (mode) group_left ()
        sum by (instance, job) (rate(weft_lane_seconds_total{lane=~"compute.*"}[1m]))
        """,
    ),
    _recording(
        "instance_job:weft_stall:share1m",
        """
        sum by (instance, job) (instance_job_mode:weft_compute:share1m{mode=~"stall_.*|recovery|idle"})
        """,
    ),
    _recording(
        "instance_job:weft_bubble:share1m",
        """
        sum by (instance, job) (instance_job_mode:weft_compute:share1m{mode=~"stall_activation|stall_gradient"})
        """,
    ),
    _recording(
        "instance_job:weft_imbalance:ratio1m",
        """
        max by (instance, job) (
          sum by (instance, job, worker) (rate(weft_lane_seconds_total{lane=~"compute.*",mode=~"forward|backward"}[1m]))
        )
          /
        avg by (instance, job) (
          sum by (instance, job, worker) (rate(weft_lane_seconds_total{lane=~"compute.*",mode=~"forward|backward"}[1m]))
        )
        """,
    ),
    _recording(
        "instance_job:weft_hidden:share1m",
        """
        sum by (instance, job) (rate(weft_overlap_seconds_total[1m]))
          / (
            sum by (instance, job) (rate(weft_overlap_seconds_total[1m]))
            + sum by (instance, job) (rate(weft_exposed_seconds_total[1m]))
          )
        """,
    ),
    _recording(
        "instance_job:weft_iteration_seconds:mean1m",
        """
        sum by (instance, job) (rate(weft_iteration_seconds_sum[1m]))
          / sum by (instance, job) (rate(weft_iteration_seconds_count[1m]))
        """,
    ),
    _recording(
        "instance_job:weft_iteration_over_limit:ratio1m",
        """
        instance_job:weft_iteration_seconds:mean1m
          / max by (instance, job) (weft_iteration_limit_seconds)
          >= 0.995
        """,
    ),
    _recording(
        "instance_job:weft_residual:share",
        """
        sum by (instance, job) (weft_lane_residual_seconds)
          / avg by (instance, job) (sum by (instance, job, worker, lane) (weft_lane_seconds_total))
        """,
    ),
    _recording(
        "instance:weft_event_loop_lag_seconds:p99_5m",
        """
        histogram_quantile(0.99, sum by (instance, le) (rate(weft_event_loop_lag_seconds_bucket[5m])))
        """,
    ),
)

ALERTS: Final = (
    Alert(
        name="WeftDown",
        expression='up{job="weft"} == 0',
        holds="2m",
        severity="critical",
        summary="The daemon at {{ $labels.instance }} does not answer.",
        remedy="`systemctl --user status weft` and its journal; unfinished jobs start again with the daemon.",
    ),
    Alert(
        name="WeftLedgerUnwritable",
        expression="weft_ledger_writable == 0",
        holds="1m",
        severity="critical",
        summary="The ledger of {{ $labels.instance }} takes nothing: its disk is full, or fails.",
        remedy="`weft ps` says why; make room in the state directory before the daemon stops. Submits are refused.",
    ),
    Alert(
        name="WeftWorkerDown",
        expression="weft_worker_up == 0",
        holds="2m",
        severity="warning",
        summary="Worker {{ $labels.worker }} of {{ $labels.instance }} is down.",
        remedy="A worker is replaced within seconds; if not, workers.log in the daemon's state directory says why.",
    ),
    Alert(
        name="WeftWorkersRestart",
        expression="sum by (instance) (increase(weft_worker_restarts_total[15m])) > 3",
        holds="1m",
        severity="warning",
        summary="{{ $labels.instance }} has replaced {{ $value | humanize }} workers in 15 minutes.",
        remedy="signal-9 as the reason is mostly the kernel out of memory: `dmesg`, then fewer jobs or workers.",
    ),
    Alert(
        name="WeftJobFailed",
        expression='delta(weft_jobs{state="failed"}[10m]) > 0',
        holds="0m",
        severity="warning",
        summary="A job has failed on {{ $labels.instance }} in the last 10 minutes.",
        remedy="`weft ps` names it and the reason, `weft logs JOB` has the traceback.",
    ),
    Alert(
        name="WeftJobHangs",
        expression="sum by (instance, cause) (increase(weft_hangs_total[10m])) > 0",
        holds="0m",
        severity="warning",
        summary="A job of {{ $labels.instance }} hung in the last 10 minutes ({{ $labels.cause }}).",
        remedy="Its log says who waits for whom, stacks-*.txt in its run directory where each worker was.",
    ),
    Alert(
        name="WeftJobStuck",
        expression=(
            "changes(weft_job_step[10m]) == 0 and on (instance, job) (weft_job_step offset 10m)\n"
            "  and on (instance, job) (min_over_time(weft_shared_memory_bytes[10m]) > 0)"
        ),
        holds="0m",
        severity="critical",
        summary="{{ $labels.job }} has finished no step in 10 minutes.",
        remedy="`weft show JOB` says where its lanes wait. A step that takes longer than this is no fault.",
    ),
    Alert(
        name="WeftJobStalls",
        expression="instance_job:weft_stall:share1m > 0.5",
        holds="10m",
        severity="warning",
        summary="The compute lanes of {{ $labels.job }} wait {{ $value | humanizePercentage }} of their time.",
        remedy="The Pipeline board shows for what: another cut or schedule, more microbatches, or faster data.",
    ),
    Alert(
        name="WeftJobSlowerThanLimit",
        expression="instance_job:weft_iteration_over_limit:ratio1m > 2",
        holds="15m",
        severity="info",
        summary="{{ $labels.job }} takes {{ $value | humanize }} times the iteration that its plan allows.",
        remedy="Something else uses the workers' cores, or the window is too small: see stall_dispatch.",
    ),
    Alert(
        name="WeftJobsWait",
        expression=(
            'sum by (instance) (weft_jobs{state="queued"}) > 0\n'
            '  and sum by (instance) (weft_jobs{state=~"planning|running|recovering"}) == 0'
        ),
        holds="5m",
        severity="warning",
        summary="Jobs wait on {{ $labels.instance }} and none runs.",
        remedy="`weft ps` says in a sentence why each of them waits.",
    ),
    Alert(
        name="WeftQueueIsSlow",
        expression=("histogram_quantile(0.9, sum by (instance, le) (rate(weft_queue_wait_seconds_bucket[1h]))) > 900"),
        holds="5m",
        severity="info",
        summary="One in ten jobs of {{ $labels.instance }} has waited over 15 minutes for its workers.",
        remedy="Submit less, ask for fewer workers for each job, or give the daemon more.",
    ),
    Alert(
        name="WeftEventLoopLags",
        expression="instance:weft_event_loop_lag_seconds:p99_5m > 0.1",
        holds="5m",
        severity="warning",
        summary="The event loop of {{ $labels.instance }} is {{ $value | humanizeDuration }} late.",
        remedy="The daemon lacks a core, or its disk is slow: lanes then wait for dispatch.",
    ),
    Alert(
        name="WeftTimeUnaccounted",
        expression="instance_job:weft_residual:share > 0.01",
        holds="10m",
        severity="warning",
        summary="{{ $value | humanizePercentage }} of a lane's time in {{ $labels.job }} is in no mode.",
        remedy="The stamps of a lane have gaps: a bug of Weft, please report it with the job's recording.",
    ),
)


def families() -> dict[str, frozenset[str]]:
    """What boards and alerts may ask for: all that is exported, and what is recorded from it."""
    return exported() | {recording.record: recording.labels for recording in RECORDINGS}


def check_rules() -> None:
    """Errors: QueryError."""
    known = families()
    for rule in (*RECORDINGS, *ALERTS):
        check_query(rule.expression, known)


def recording_rules() -> str:
    """rules.yml."""
    lines = [MADE_BY + "groups:", "  - name: weft", f"    interval: {INTERVAL}", "    rules:"]
    for rule in RECORDINGS:
        lines += [f"      - record: {rule.record}", "        expr: |", indent(rule.expression, " " * 10)]
    return "\n".join(lines) + "\n"


def alert_rules() -> str:
    """alerts.yml."""
    lines = [MADE_BY + "groups:", "  - name: weft-alerts", f"    interval: {INTERVAL}", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            "        expr: |",
            indent(alert.expression, " " * 10),
            f"        for: {alert.holds}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.remedy)}",
        ]
    return "\n".join(lines) + "\n"
