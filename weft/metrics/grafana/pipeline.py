"""The Pipeline board: where the seconds of a job's lanes go."""

from __future__ import annotations

from typing import Final

from weft.metrics.grafana.board import Dashboard, Panel, Query
from weft.metrics.grafana.jobs import JOB

LANES: Final = f'{JOB},worker=~"$worker"'
COMPUTE: Final = f'{LANES},lane=~"compute.*"'
RATE: Final = "[$__rate_interval]"
STALLS: Final = 'mode=~"stall_.*|recovery|idle"'


def _share(by: str, chosen: str, whole: str) -> str:
    """Of the lanes' time, by label; chosen and whole: which seconds."""
    total = f"sum(rate(weft_lane_seconds_total{{{whole}}}{RATE}))"
    return f"sum by ({by}) (rate(weft_lane_seconds_total{{{chosen}}}{RATE})) / on () group_left () {total}"


def _share_of_each(by: str, chosen: str, whole: str) -> str:
    """The same, against the time of those of the same labels."""
    parts = [f"sum by ({by}) (rate(weft_lane_seconds_total{{{which}}}{RATE}))" for which in (chosen, whole)]
    return " / ".join(parts)


_MODES = Panel(
    title="Time of the compute lanes by mode",
    text="All of it: each instant of each lane is in exactly one mode. Forward and backward are the work; update and "
    "sync here are what nothing hides; stalls name what the lanes wait for.",
    unit="percentunit",
    width=16,
    height=10,
    top=1.0,
    stacked=True,
    queries=(Query(expression=_share("mode", COMPUTE, COMPUTE), legend="{{mode}}"),),
)

_CAUSES = Panel(
    title="Stalls of the compute lanes by cause",
    text="data: the loader is slow. activation, gradient: the pipeline's bubble. sync, update: synchronisation that "
    "computation does not hide. slot: too few slots. dispatch: the daemon is late, widen the window.",
    unit="percentunit",
    width=8,
    height=10,
    queries=(Query(expression=_share("mode", f"{COMPUTE},{STALLS}", COMPUTE), legend="{{mode}}"),),
)

_STALLED_WORKERS = Panel(
    title="Stalled share of each worker's compute lane",
    text="The worker that stalls least is the one that the others wait for: it has the slowest stage.",
    unit="percentunit",
    width=8,
    top=1.0,
    queries=(
        Query(
            expression=_share_of_each("instance, job, worker", f"{COMPUTE},{STALLS}", COMPUTE),
            legend="{{job}}: {{worker}}",
        ),
    ),
)

_OTHER_LANES = Panel(
    title="Busy share of the other lanes",
    text="load: a loader near 1 holds up the job. sync: reductions and updates beside computation. fetch, d2h, h2d: a "
    "device's copies.",
    unit="percentunit",
    width=8,
    top=1.0,
    queries=(
        Query(
            expression=_share_of_each(
                "instance, job, worker, lane",
                f'{LANES},lane!~"compute.*",mode!~"stall_.*|recovery|idle"',
                f'{LANES},lane!~"compute.*"',
            ),
            legend="{{job}}: {{worker}}/{{lane}}",
        ),
    ),
)

_OTHER_CAUSES = Panel(
    title="Stalls of the other lanes by cause",
    text="A loader that waits for slots is ahead of the job, as it should be; one that always does could have fewer. A "
    "sync lane that waits for sync has nothing to do.",
    unit="percentunit",
    width=8,
    queries=(
        Query(
            expression=_share("mode", f'{LANES},lane!~"compute.*",{STALLS}', f'{LANES},lane!~"compute.*"'),
            legend="{{mode}}",
        ),
    ),
)

_BUBBLE = Panel(
    title="Bubble",
    text="Share of the compute lanes' time in which they wait for activations or gradients. More microbatches make it "
    "smaller.",
    unit="percentunit",
    width=8,
    queries=(Query(expression=f"instance_job:weft_bubble:share1m{{{JOB}}}", legend="{{job}}"),),
)

_IMBALANCE = Panel(
    title="Imbalance",
    text="Forward and backward seconds of the busiest worker over those of the mean one. 1: the cut is even.",
    unit="none",
    width=8,
    queries=(Query(expression=f"instance_job:weft_imbalance:ratio1m{{{JOB}}}", legend="{{job}}"),),
)

_MICROBATCHES = Panel(
    title="Forwards and backwards by how long they took",
    text="Of one microbatch in one stage. A stage that is slower than the others, or a core that is shared, is a band "
    "of its own.",
    unit="s",
    kind="heatmap",
    width=8,
    queries=(
        Query(
            expression=f"sum by (le) (rate(weft_microbatch_seconds_bucket{{{JOB}}}{RATE}))",
            legend="{{le}}",
        ),
    ),
)

_HIDDEN = Panel(
    title="Synchronisation, transfer and update: hidden and exposed",
    text="Seconds of each in a second. Hidden ran while the worker computed and cost nothing; exposed is what an "
    "iteration is longer by.",
    unit="s",
    stacked=True,
    queries=(
        Query(
            expression=f"sum by (kind) (rate(weft_overlap_seconds_total{{{LANES}}}{RATE}))", legend="{{kind}}: hidden"
        ),
        Query(
            expression=f"sum by (kind) (rate(weft_exposed_seconds_total{{{LANES}}}{RATE}))", legend="{{kind}}: exposed"
        ),
    ),
)

_HIDDEN_SHARE = Panel(
    title="Hidden share",
    text="Of the time of synchronisation, transfer and update, the part that ran beside computation.",
    unit="percentunit",
    top=1.0,
    width=6,
    queries=(Query(expression=f"instance_job:weft_hidden:share1m{{{JOB}}}", legend="{{job}}"),),
)

_TRANSFER = Panel(
    title="Transfers",
    text="To devices: samples (fetch), parameters or sums of gradients (up, reload, refresh); from them: gradients "
    "(down).",
    unit="Bps",
    width=6,
    queries=(
        Query(
            expression=f"sum by (instance, job, kind) (rate(weft_transfer_bytes_total{{{JOB}}}{RATE}))",
            legend="{{job}}: {{kind}}",
        ),
    ),
)

_RESIDUAL = Panel(
    title="Unaccounted time",
    text="Time of a job's lanes that is in no mode, in percent of one lane's. Above 1 % the other panels lie.",
    unit="percentunit",
    width=24,
    height=5,
    queries=(Query(expression=f"instance_job:weft_residual:share{{{JOB}}}", legend="{{job}}"),),
)

PIPELINE: Final = Dashboard(
    uid="weft-pipeline",
    title="Pipeline",
    text="Where the time of a job's lanes goes: work, stalls by cause, and what computation hides.",
    variables=("instance", "job", "worker"),
    rows=(
        ("Lanes", (_MODES, _CAUSES, _STALLED_WORKERS, _OTHER_LANES, _OTHER_CAUSES)),
        ("Stages", (_BUBBLE, _IMBALANCE, _MICROBATCHES)),
        ("Overlap", (_HIDDEN, _HIDDEN_SHARE, _TRANSFER)),
        ("Accounting", (_RESIDUAL,)),
    ),
)
