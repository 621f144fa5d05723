"""A running job's live numbers as Prometheus sees them: from its accounts to the exporter, once a tick."""

from __future__ import annotations

from weft.metrics.exporter import Exporter
from weft.scheduler.job_run import JobRun


def publish(exporter: Exporter, name: str, run: JobRun) -> None:
    """What has changed since the last call; cheap enough for every tick."""
    exporter.set("weft_job_step", run.step, job=name)
    if run.loss is not None:
        exporter.set("weft_job_loss", run.loss, job=name)
    _publish_lanes(exporter, name, run)
    for worker, kinds in run.overlap.take_seconds().items():
        for kind, seconds in kinds.items():
            exporter.add("weft_overlap_seconds_total", seconds["hidden"], job=name, worker=worker, kind=kind)
            exporter.add("weft_exposed_seconds_total", seconds["exposed"], job=name, worker=worker, kind=kind)


def publish_limit(exporter: Exporter, name: str, run: JobRun) -> None:
    """The graph's speed limit, from the tasks as they ran of late; the critical cycle takes milliseconds to find."""
    if (limit := run.limit_seconds()) is not None:
        exporter.set("weft_iteration_limit_seconds", limit, job=name)


def _publish_lanes(exporter: Exporter, name: str, run: JobRun) -> None:
    for lane, modes in run.account.take_seconds().items():
        worker, _, lane_name = lane.partition("/")
        for mode, seconds in modes.items():
            exporter.add("weft_lane_seconds_total", seconds, job=name, worker=worker, lane=lane_name, mode=mode)
        residual = run.account.residual_seconds(lane)
        exporter.set("weft_lane_residual_seconds", residual, job=name, worker=worker, lane=lane_name)
