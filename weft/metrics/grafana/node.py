"""The Node and daemon board: is the daemon healthy, and are its workers."""

from __future__ import annotations

from typing import Final

from weft.metrics.grafana.board import Dashboard, Panel, Query
from weft.metrics.grafana.jobs import INSTANCE

RATE: Final = "[$__rate_interval]"


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(
        Query(
            expression=f"histogram_quantile({quantile}, sum by (le) (rate({histogram}_bucket{{{INSTANCE}}}{RATE})))",
            legend=f"{100 * quantile:.0f} % below",
        )
        for quantile in (0.5, 0.95, 0.99)
    )


_UP = Panel(
    title="Daemons and workers up",
    text="A worker is replaced within seconds; one that stays away says why in workers.log.",
    unit="none",
    kind="stat",
    width=8,
    height=6,
    queries=(
        Query(expression=f'sum(up{{job="weft",{INSTANCE}}})', legend="daemons"),
        Query(expression=f'sum(weft_worker_up{{{INSTANCE},worker=~"$worker"}})', legend="workers"),
    ),
)

_BUILD = Panel(
    title="Versions",
    text="Of Weft, Python and torch that each daemon runs.",
    unit="none",
    kind="table",
    width=16,
    height=6,
    queries=(Query(expression=f"weft_build_info{{{INSTANCE}}}", legend="{{version}}"),),
)

_WORKERS = Panel(
    title="Each worker",
    text="1 while it is up.",
    unit="none",
    top=1.0,
    queries=(Query(expression=f'weft_worker_up{{{INSTANCE},worker=~"$worker"}}', legend="{{instance}}: {{worker}}"),),
)

_RESTARTS = Panel(
    title="Workers replaced, by reason",
    text="Since the daemon started. signal-9: killed, mostly by the kernel that was out of memory. exit: by the job's "
    "code, or because a job had left it unclean.",
    unit="none",
    queries=(Query(expression=f"sum by (reason) (weft_worker_restarts_total{{{INSTANCE}}})", legend="{{reason}}"),),
)

_LAG = Panel(
    title="Event loop: how late a timer ran",
    text="While the loop is late nobody gets a dispatch or an answer. The daemon needs a part of a core to itself.",
    unit="s",
    logarithmic=True,
    queries=_quantiles("weft_event_loop_lag_seconds"),
)

_DISPATCH = Panel(
    title="Dispatch: from a report to the tasks that it allows",
    text="Hidden as long as lanes have tasks in their window; see stall_dispatch on the Pipeline board.",
    unit="s",
    logarithmic=True,
    queries=_quantiles("weft_dispatch_latency_seconds"),
)

_CONNECTIONS = Panel(
    title="Clients",
    text="Connected to the control socket.",
    unit="none",
    width=8,
    queries=(Query(expression=f"weft_control_connections{{{INSTANCE}}}", legend="{{instance}}"),),
)

_REJECTED = Panel(
    title="Frames refused, by reason",
    text="Since the daemon started: clients that speak another protocol, too much or too slowly.",
    unit="none",
    width=8,
    queries=(
        Query(expression=f"sum by (reason) (weft_control_rejected_frames_total{{{INSTANCE}}})", legend="{{reason}}"),
    ),
)

_MEMORY = Panel(
    title="Shared memory by job",
    text="What is left in /dev/shm bounds what the next job may ask for.",
    unit="bytes",
    width=8,
    stacked=True,
    queries=(Query(expression=f"sum by (instance, job) (weft_shared_memory_bytes{{{INSTANCE}}})", legend="{{job}}"),),
)

_SCRAPE = Panel(
    title="Scrape time",
    text="Of /metrics, as Prometheus sees it. It should stay below 0.1 s.",
    unit="s",
    queries=(Query(expression=f'scrape_duration_seconds{{job="weft",{INSTANCE}}}', legend="{{instance}}"),),
)

_SERIES = Panel(
    title="Series of a scrape",
    text="A job's series go a minute after its end; at 32 jobs of 16 stages there are below 12,000.",
    unit="short",
    queries=(Query(expression=f'scrape_samples_scraped{{job="weft",{INSTANCE}}}', legend="{{instance}}"),),
)

NODE: Final = Dashboard(
    uid="weft-node",
    title="Node and daemon",
    text="Is the daemon healthy, and are its workers.",
    variables=("instance", "worker"),
    rows=(
        ("Health", (_UP, _BUILD)),
        ("Workers", (_WORKERS, _RESTARTS)),
        ("Daemon", (_LAG, _DISPATCH)),
        ("Clients and memory", (_CONNECTIONS, _REJECTED, _MEMORY)),
        ("Prometheus", (_SCRAPE, _SERIES)),
    ),
)
