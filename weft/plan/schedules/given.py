"""Given: what can be refused of a job before anybody runs it, the order included that its user has written down. Pure.

`weft.spec.admission` asks the same of all but a grid, which is a schedule of its own: it has its passes, and with them
its number of stages and of microbatches.
"""

from __future__ import annotations

from weft.plan.schedules.grid import read_grid, schedule_of
from weft.plan.schedules.schedule import ScheduleError
from weft.spec.admission import problem_of_spec
from weft.spec.job_spec import JobSpec
from weft.spec.replica import Replica
from weft.spec.schedule_text import grid_file, is_grid
from weft.spec.strategy import Strategy


def problem_of_job(spec: JobSpec) -> str | None:
    """What no machine could plan, as a sentence. The largest grids take seconds."""
    return problem_of_spec(spec) or _problem_of_grid(spec.strategy)


def _problem_of_grid(strategy: Strategy) -> str | None:
    text = strategy.schedule
    if not is_grid(text):
        return None
    try:
        read_grid(text)
        for replica in () if strategy.is_auto else _numbered(strategy):
            schedule_of(text, replica.num_stages, replica.microbatches or strategy.microbatches)
    except ScheduleError as error:
        file = grid_file(text)
        return f"strategy.schedule: {error}" if file is None else f"strategy.schedule: {file}: {error}"
    return None


def _numbered(strategy: Strategy) -> list[Replica]:
    """Those in which the schedule orders a number of stages; how many "all" GPUs are, a machine has yet to say."""
    given = strategy.replicas if isinstance(strategy.replicas, list) else strategy.replica_list
    return [each for each in given if each.working_window is None and each.stages != "all"]
