"""A query that names what nobody exports is found where it is written."""

from __future__ import annotations

import pytest

from weft.metrics.grafana.queries import QueryError, check_query, exported

FAMILIES = exported()


@pytest.mark.parametrize(
    "expression",
    [
        "weft_job_step",
        'sum by (job) (rate(weft_lane_seconds_total{lane="compute",mode=~"stall_.*"}[$__rate_interval]))',
        "sum(rate(weft_lane_seconds_total[1m])) by (job, mode)",
        "histogram_quantile(0.99, sum by (le) (rate(weft_event_loop_lag_seconds_bucket[5m])))",
        "weft_job_step / on (instance, job) group_left () weft_job_planned_steps > 1e3",
        'delta(weft_jobs{state="failed"}[10m]) > 0 and weft_jobs offset 10m unless on (instance) up == 0',
        'count(ALERTS{alertstate="firing"}) or vector(0)',
        'weft_jobs{state="a \\"quoted{name}\\""}',
    ],
)
def test_what_is_declared_may_be_asked_for(expression: str) -> None:
    check_query(expression, FAMILIES)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("weft_mood", "asks for weft_mood, which is not declared"),
        ("rate(weft_job_steps[1m])", "asks for weft_job_steps"),
        ("weft_iteration_seconds", "asks for weft_iteration_seconds, which"),
        ('weft_job_step{worker="cpu-0"}', "matches worker, which weft_job_step does not have"),
        ('weft_lane_seconds_total{le="1"}', "matches le"),
        ("sum by (stage) (weft_job_step)", "groups by stage, which none of its metrics has"),
        ("sum(weft_job_step) by (worker)", "groups by worker"),
        ("weft_job_step{job", "has no } where one belongs"),
        ("weft_job_step ? 1", "cannot be read at"),
    ],
)
def test_what_is_not_declared_is_refused_by_name(expression: str, problem: str) -> None:
    with pytest.raises(QueryError, match="^.*" + problem.replace("}", "\\}").replace("?", "\\?")):
        check_query(expression, FAMILIES)


def test_the_labels_of_a_query_are_those_of_its_metrics() -> None:
    assert check_query("weft_job_step / weft_iteration_seconds_bucket", FAMILIES) == {"instance", "job", "le"}
