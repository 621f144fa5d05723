"""Every metric that Weft exports, declared once. The exporter, the dashboards and docs/metrics.md are made from this.

`python -m weft.metrics.prometheus.declared > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

MAX_BUCKETS: Final = 12  # of a histogram, the one for +Inf counted: each is a series
MAX_SERIES: Final = 12_000  # of one scrape; 32 running jobs of 16 stages are below it, whatever their strategy


class MetricKind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One with the label `job` loses a job's series some time after the job has ended."""

    name: str
    kind: MetricKind
    unit: str  # a base unit, or what is counted
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # a histogram's finite upper edges, ascending


METRICS: Final = (
    Metric(
        name="weft_lane_seconds_total",
        kind=MetricKind.COUNTER,
        unit="seconds",
        labels=("job", "worker", "lane", "mode"),
        help="Time that a lane spent in each mode, busy or stalled; the rates of one lane sum to 1.",
    ),
    Metric(
        name="weft_lane_residual_seconds",
        kind=MetricKind.GAUGE,
        unit="seconds",
        labels=("job",),
        help="Wall time of the job's lanes that no mode accounts for, since the attempt began; all lanes together.",
    ),
    Metric(
        name="weft_overlap_seconds_total",
        kind=MetricKind.COUNTER,
        unit="seconds",
        labels=("job", "worker", "kind"),
        help="Time of sync, transfer or update in which the worker computed (for one that never does: any worker).",
    ),
    Metric(
        name="weft_exposed_seconds_total",
        kind=MetricKind.COUNTER,
        unit="seconds",
        labels=("job", "worker", "kind"),
        help="Time of sync, transfer or update that no computation hid.",
    ),
    Metric(
        name="weft_transfer_bytes_total",
        kind=MetricKind.COUNTER,
        unit="bytes",
        labels=("job", "kind"),
        help="Bytes that tasks moved to a device or a private replica (fetch: samples; up, reload, refresh: parameters "
        "or sums of gradients) or back (down).",
    ),
    Metric(
        name="weft_microbatch_seconds",
        kind=MetricKind.HISTOGRAM,
        unit="seconds",
        labels=("job",),
        buckets=(1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 1.0),
        help="Time of one forward or backward of one microbatch through one stage.",
    ),
    Metric(
        name="weft_iteration_seconds",
        kind=MetricKind.HISTOGRAM,
        unit="seconds",
        labels=("job",),
        buckets=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
        help="Wall time of one training iteration.",
    ),
    Metric(
        name="weft_iteration_limit_seconds",
        kind=MetricKind.GAUGE,
        unit="seconds",
        labels=("job",),
        help="The shortest iteration that any execution of the plan's graph can reach, from measured task times. "
        "Absent of a job with few iterations, or with shorter ones.",
    ),
    Metric(
        name="weft_plan_predicted_iteration_seconds",
        kind=MetricKind.GAUGE,
        unit="seconds",
        labels=("job",),
        help="Iteration time that the simulator predicted for the plan.",
    ),
    Metric(
        name="weft_job_step",
        kind=MetricKind.GAUGE,
        unit="iterations",
        labels=("job",),
        help="Training iterations that the job has finished; goes back when a recovery replays some.",
    ),
    Metric(
        name="weft_job_plan_changes",
        kind=MetricKind.GAUGE,
        unit="changes",
        labels=("job",),
        help="Times that the job has gone on with another plan, since what its tasks took said so.",
    ),
    Metric(
        name="weft_job_planned_steps",
        kind=MetricKind.GAUGE,
        unit="iterations",
        labels=("job",),
        help="Training iterations that the job has when it is done.",
    ),
    Metric(
        name="weft_job_attempt",
        kind=MetricKind.GAUGE,
        unit="1",
        labels=("job",),
        help="Which attempt at running the job this is; above 1 after a recovery.",
    ),
    Metric(
        name="weft_job_loss",
        kind=MetricKind.GAUGE,
        unit="1",
        labels=("job",),
        help="Training loss of the newest finished iteration.",
    ),
    Metric(
        name="weft_job_learning_rate",
        kind=MetricKind.GAUGE,
        unit="1",
        labels=("job",),
        help="Learning rate of the newest finished iteration.",
    ),
    Metric(
        name="weft_job_samples_total",
        kind=MetricKind.COUNTER,
        unit="samples",
        labels=("job",),
        help="Samples trained on.",
    ),
    Metric(
        name="weft_jobs",
        kind=MetricKind.GAUGE,
        unit="jobs",
        labels=("state",),
        help="Jobs in the ledger in each state.",
    ),
    Metric(
        name="weft_ledger_writable",
        kind=MetricKind.GAUGE,
        unit="boolean",
        help="1 where the ledger's file could be used when it was last tried, 0 while its disk is full or fails.",
    ),
    Metric(
        name="weft_ledger_unwritten_jobs",
        kind=MetricKind.GAUGE,
        unit="jobs",
        help="Jobs whose newest state is in the daemon's memory alone, until the ledger's disk takes it.",
    ),
    Metric(
        name="weft_ledger_unreadable_jobs",
        kind=MetricKind.GAUGE,
        unit="jobs",
        help="Jobs whose row in the ledger could not be read; the row is left as it is, the job not served.",
    ),
    Metric(
        name="weft_ledger_errors_total",
        kind=MetricKind.COUNTER,
        unit="errors",
        labels=("reason",),
        help="Tries to use the ledger that failed: full, io, cannot-open, read-only, damaged, lost, held, other.",
    ),
    Metric(
        name="weft_jobs_ended_total",
        kind=MetricKind.COUNTER,
        unit="jobs",
        labels=("state", "reason"),
        help="Jobs that have ended since the daemon started, by how and why; the reason of a success is empty.",
    ),
    Metric(
        name="weft_recoveries_total",
        kind=MetricKind.COUNTER,
        unit="recoveries",
        labels=("cause",),
        help="Attempts at running a job that were given up to start another, by why.",
    ),
    Metric(
        name="weft_replays_total",
        kind=MetricKind.COUNTER,
        unit="replays",
        labels=("result",),
        help="Iterations that were run again by other workers, where strategy.verify is replay: same, or different.",
    ),
    Metric(
        name="weft_hangs_total",
        kind=MetricKind.COUNTER,
        unit="hangs",
        labels=("cause",),
        help="Jobs of which nothing came to an end any more: a worker was stopped, or silent; a task did not return; "
        "nobody did anything; a phase (preparing, saving) took very long.",
    ),
    Metric(
        name="weft_job_snapshot_step",
        kind=MetricKind.GAUGE,
        unit="step",
        labels=("job",),
        help="The training step that an attempt after a lost worker would go on after; absent before there is one.",
    ),
    Metric(
        name="weft_checkpoints_total",
        kind=MetricKind.COUNTER,
        unit="checkpoints",
        labels=("result",),
        help="Checkpoints that were written, and those that could not be (failed).",
    ),
    Metric(
        name="weft_queue_wait_seconds",
        kind=MetricKind.HISTOGRAM,
        unit="seconds",
        buckets=(0.1, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
        help="Time from a job's submit to its start.",
    ),
    Metric(
        name="weft_worker_up",
        kind=MetricKind.GAUGE,
        unit="1",
        labels=("worker",),
        help="1 while the worker answers heartbeats, else 0.",
    ),
    Metric(
        name="weft_worker_restarts_total",
        kind=MetricKind.COUNTER,
        unit="workers",
        labels=("reason",),
        help="Workers replaced, by why.",
    ),
    Metric(
        name="weft_dispatch_latency_seconds",
        kind=MetricKind.HISTOGRAM,
        unit="seconds",
        buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0),
        help="Time from the arrival of a report to the sending of the tasks that it made dispatchable.",
    ),
    Metric(
        name="weft_event_loop_lag_seconds",
        kind=MetricKind.HISTOGRAM,
        unit="seconds",
        buckets=(1e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 1.0),
        help="How late the daemon's event loop ran a timer.",
    ),
    Metric(
        name="weft_control_connections",
        kind=MetricKind.GAUGE,
        unit="connections",
        help="Clients connected to the control socket.",
    ),
    Metric(
        name="weft_control_rejected_frames_total",
        kind=MetricKind.COUNTER,
        unit="frames",
        labels=("reason",),
        help="Frames, requests and connections of clients that were refused, by the error code that they were given.",
    ),
    Metric(
        name="weft_http_connections",
        kind=MetricKind.GAUGE,
        unit="connections",
        help="Connections open to the address of /metrics and the timeline page.",
    ),
    Metric(
        name="weft_http_dropped_connections_total",
        kind=MetricKind.COUNTER,
        unit="connections",
        labels=("reason",),
        help="HTTP connections that the daemon ended: idle (asked or took nothing in time), replaced by a newer one, "
        "or full (refused: all are busy).",
    ),
    Metric(
        name="weft_run_directory_errors_total",
        kind=MetricKind.COUNTER,
        unit="errors",
        labels=("reason",),
        help="Writes below a run directory that failed: no-space, io, descriptors, foreign (no file of ours), other.",
    ),
    Metric(
        name="weft_run_directory_lost_lines_total",
        kind=MetricKind.COUNTER,
        unit="lines",
        labels=("file",),
        help="Lines of jobs' logs and step logs that were given up after their writes had failed for too long.",
    ),
    Metric(
        name="weft_shared_memory_bytes",
        kind=MetricKind.GAUGE,
        unit="bytes",
        labels=("job",),
        help="Shared memory that the job's board and arenas hold; 0 while it is paused or waits.",
    ),
    Metric(
        name="weft_build_info",
        kind=MetricKind.GAUGE,
        unit="1",
        labels=("version", "python", "torch"),
        help="Always 1; the versions of Weft, Python and torch that the daemon and its workers run.",
    ),
)


def table() -> str:
    """docs/metrics.md: one row for each metric, buckets below."""
    lines = [
        "# Metrics",
        "",
        "Made by `python -m weft.metrics.prometheus.declared > docs/metrics.md`.",
        "",
        "Series with the label `job` go a minute after the job has ended, so that its last values are scraped. Sums",
        "over any label make sense, except of the `weft_job_` gauges and the two iteration gauges, which are read for",
        "one job at a time. [dashboards.md](dashboards.md) shows what is drawn from them.",
        "",
        "| name | kind | unit | labels | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        labels = " ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
    lines += ["", "## Histogram buckets", "", "| name | upper edges |", "| --- | --- |"]
    for metric in METRICS:
        if metric.buckets:
            edges = " ".join(f"{edge:g}" for edge in metric.buckets)
            lines.append(f"| `{metric.name}` | {edges} +Inf |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
