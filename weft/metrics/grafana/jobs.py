"""The boards that look at jobs from outside: Overview, of all of them, and Job, of one."""

from __future__ import annotations

from typing import Final

from weft.metrics.grafana.board import Dashboard, Panel, Query

INSTANCE: Final = 'instance=~"$instance"'
JOB: Final = f'{INSTANCE},job=~"$job"'


def _quantile(quantile: float, histogram: str, over: str, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, sum by ({by}) (rate({histogram}[{over}])))"


_STATE = Panel(
    title="Jobs now",
    text="Jobs that have not ended, by state. `weft ps` says in a sentence why one waits.",
    unit="none",
    kind="stat",
    height=5,
    queries=(
        Query(
            expression=f'sum by (state) (weft_jobs{{{INSTANCE},state=~"queued|planning|running|paused|recovering"}})',
            legend="{{state}}",
        ),
    ),
)

_ENDED = Panel(
    title="Jobs that have ended",
    text="All that the ledger has, by how they ended.",
    unit="none",
    kind="stat",
    width=6,
    height=5,
    queries=(
        Query(
            expression=f'sum by (state) (weft_jobs{{{INSTANCE},state=~"completed|failed|cancelled"}})',
            legend="{{state}}",
        ),
    ),
)

_ALERTS = Panel(
    title="Alerts and daemons",
    text="Alerts that fire now, and daemons that answer.",
    unit="none",
    kind="stat",
    width=6,
    height=5,
    queries=(
        Query(expression='count(ALERTS{alertstate="firing",alertname=~"Weft.*"}) or vector(0)', legend="alerts"),
        Query(expression=f'sum(up{{job="weft",{INSTANCE}}})', legend="daemons up"),
    ),
)

_QUEUE = Panel(
    title="Jobs by state",
    text="A queue that grows while few run: jobs ask for more workers than there are.",
    unit="none",
    stacked=True,
    queries=(
        Query(
            expression=f'sum by (state) (weft_jobs{{{INSTANCE},state=~"queued|planning|running|paused|recovering"}})',
            legend="{{state}}",
        ),
    ),
)

_WAIT = Panel(
    title="Wait in the queue",
    text="From submit to start, of the jobs that started in the last hour.",
    unit="s",
    queries=(
        Query(
            expression=_quantile(0.5, f"weft_queue_wait_seconds_bucket{{{INSTANCE}}}", "1h"),
            legend="half of them below",
        ),
        Query(
            expression=_quantile(0.9, f"weft_queue_wait_seconds_bucket{{{INSTANCE}}}", "1h"), legend="nine of ten below"
        ),
    ),
)

_FAILURES = Panel(
    title="Failures by reason",
    text="Jobs that have failed since the daemon started. `weft logs JOB` has the traceback.",
    unit="none",
    queries=(
        Query(expression=f'sum by (reason) (weft_jobs_ended_total{{{INSTANCE},state="failed"}})', legend="{{reason}}"),
    ),
)

_RECOVERIES = Panel(
    title="Recoveries by cause",
    text="Attempts that were given up to start another: each costs a job what it had done.",
    unit="none",
    queries=(Query(expression=f"sum by (cause) (weft_recoveries_total{{{INSTANCE}}})", legend="{{cause}}"),),
)

_ALL_THROUGHPUT = Panel(
    title="Throughput of each job",
    text="Samples trained on in a second.",
    unit="suffix:samples/s",
    job_link=True,
    queries=(
        Query(
            expression=f"sum by (instance, job) (rate(weft_job_samples_total{{{INSTANCE}}}[$__rate_interval]))",
            legend="{{job}}",
        ),
    ),
)

_ALL_PROGRESS = Panel(
    title="Progress of each job",
    text="Training iterations done, of those that the job has. It goes back where a job starts again.",
    unit="percentunit",
    top=1.0,
    job_link=True,
    queries=(
        Query(expression=f"weft_job_step{{{INSTANCE}}} / weft_job_planned_steps{{{INSTANCE}}}", legend="{{job}}"),
    ),
)

_ALL_STALLS = Panel(
    title="Share of time in which each job's compute lanes wait",
    text="0 is what a single worker without data problems reaches. The Pipeline board shows what they wait for.",
    unit="percentunit",
    top=1.0,
    job_link=True,
    queries=(Query(expression=f"instance_job:weft_stall:share1m{{{INSTANCE}}}", legend="{{job}}"),),
)

_ALL_OVER_LIMIT = Panel(
    title="Iteration time over its limit, of each job",
    text="1: as fast as the graph allows with its tasks' measured times. Above: overhead, or others on the cores.",
    unit="none",
    job_link=True,
    queries=(Query(expression=f"instance_job:weft_iteration_over_limit:ratio1m{{{INSTANCE}}}", legend="{{job}}"),),
)

OVERVIEW: Final = Dashboard(
    uid="weft-overview",
    title="Overview",
    text="All jobs of all daemons: what runs, what waits, what failed.",
    variables=("instance",),
    rows=(
        ("Now", (_STATE, _ENDED, _ALERTS)),
        ("Queue", (_QUEUE, _WAIT)),
        ("Failures", (_FAILURES, _RECOVERIES)),
        ("Jobs", (_ALL_THROUGHPUT, _ALL_PROGRESS, _ALL_STALLS, _ALL_OVER_LIMIT)),
    ),
)

_LOSS = Panel(
    title="Loss",
    text="Training loss of the newest iteration.",
    unit="none",
    logarithmic=True,
    queries=(Query(expression=f"weft_job_loss{{{JOB}}}", legend="{{job}}"),),
)

_LEARNING_RATE = Panel(
    title="Learning rate",
    text="Of the first parameter group, as the optimizer had it in the newest iteration.",
    unit="none",
    queries=(Query(expression=f"weft_job_learning_rate{{{JOB}}}", legend="{{job}}"),),
)

_THROUGHPUT = Panel(
    title="Throughput",
    text="Samples trained on in a second.",
    unit="suffix:samples/s",
    queries=(
        Query(
            expression=f"sum by (instance, job) (rate(weft_job_samples_total{{{JOB}}}[$__rate_interval]))",
            legend="{{job}}",
        ),
    ),
)

_STEPS = Panel(
    title="Steps",
    text="Training iterations done, and those that the job has. Done goes back where the job starts again.",
    unit="short",
    queries=(
        Query(expression=f"weft_job_step{{{JOB}}}", legend="{{job}}: done"),
        Query(expression=f"weft_job_planned_steps{{{JOB}}}", legend="{{job}}: in all"),
    ),
)

_ITERATION = Panel(
    title="Iteration: measured, predicted, limit",
    text="Predicted: by the simulator, when the job was planned. Limit: the shortest that the plan's graph allows with "
    "the tasks' times of now. Measured far above both: the workers' cores are not their own.",
    unit="s",
    queries=(
        Query(expression=f"instance_job:weft_iteration_seconds:mean1m{{{JOB}}}", legend="{{job}}: measured, mean"),
        Query(
            expression=_quantile(
                0.95, f"weft_iteration_seconds_bucket{{{JOB}}}", "$__rate_interval", "instance, job, le"
            ),
            legend="{{job}}: 95 % below",
        ),
        Query(expression=f"weft_plan_predicted_iteration_seconds{{{JOB}}}", legend="{{job}}: predicted"),
        Query(expression=f"weft_iteration_limit_seconds{{{JOB}}}", legend="{{job}}: limit"),
    ),
)

_ITERATIONS = Panel(
    title="Iteration times",
    text="How many iterations took how long. A second band is validation, a checkpoint, or another job on the cores.",
    unit="s",
    kind="heatmap",
    queries=(
        Query(
            expression=f"sum by (le) (rate(weft_iteration_seconds_bucket{{{JOB}}}[$__rate_interval]))", legend="{{le}}"
        ),
    ),
)

_RATIO = Panel(
    title="Iteration time over its limit",
    text="1: nothing is left to gain without another plan.",
    unit="none",
    queries=(Query(expression=f"instance_job:weft_iteration_over_limit:ratio1m{{{JOB}}}", legend="{{job}}"),),
)

_ATTEMPTS = Panel(
    title="Attempts",
    text="Each recovery begins a new one.",
    unit="none",
    queries=(Query(expression=f"weft_job_attempt{{{JOB}}}", legend="{{job}}"),),
)

_JOB_MEMORY = Panel(
    title="Shared memory",
    text="Of the job's board, slots and parameters.",
    unit="bytes",
    queries=(Query(expression=f"weft_shared_memory_bytes{{{JOB}}}", legend="{{job}}"),),
)

_JOB_MODES = Panel(
    title="What its compute lanes do",
    text="Shares of their time; the Pipeline board shows the lanes one by one.",
    unit="percentunit",
    top=1.0,
    stacked=True,
    queries=(
        Query(
            expression=f"avg by (mode) (instance_job_mode:weft_compute:share1m{{{JOB}}})",
            legend="{{mode}}",
        ),
    ),
)

JOB_BOARD: Final = Dashboard(
    uid="weft-job",
    title="Job",
    text="One job: does it learn, how fast is it, and how fast could it be.",
    variables=("instance", "job"),
    rows=(
        ("Training", (_LOSS, _LEARNING_RATE, _THROUGHPUT, _STEPS)),
        ("Speed", (_ITERATION, _ITERATIONS, _RATIO, _JOB_MODES)),
        ("Restarts and memory", (_ATTEMPTS, _JOB_MEMORY)),
    ),
)
