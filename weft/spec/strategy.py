"""Strategy: the axes of a plan, as the `[strategy]` table of a spec gives them, and what they come to for each replica.

A preset is resolved while the table is validated: the strategy then has the row's values where the table gave none, so
whoever reads it never looks at `preset`. A strategy that is dumped and validated again comes out equal.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from weft.spec.field_errors import LIST, NUMBER, WORD
from weft.spec.presets import AUTO, PRESETS
from weft.spec.replica import (
    LEAST_OF_ALL,
    MAX_MICROBATCHES,
    MAX_STAGES,
    STAGES,
    Replica,
    Split,
    check_split,
    shown_replicas,
    word_or_number,
)
from weft.spec.schedule_text import MEASURED, SCHEDULE_NAMES, SPLITTING, is_grid, known_schedule
from weft.spec.section import MAX_COUNT, Section

MAX_REPLICAS = 64  # more than a machine has uses for; each is a whole model
MAX_STALENESS = 16  # that many versions of the parameters are alive at once; no published result goes near it
MAX_BUCKET_MIB = 4096
MAX_THREADS = 1024  # as of a daemon's workers
MAX_LOADERS = 64  # each is a process; a machine with more cores for them is not in sight
MAX_PREFETCH = 16  # whole batches, and slots of a device: they are memory
LEAST_BATCHES, SMALL_BATCHES = 2, 8  # loaded ahead, where nothing is said
SMALL_BATCH_BYTES = 1 << 20  # eight of them are no memory to speak of

_CUT = ("stages", "split")  # of every replica where `replicas` is no list; a listed one has its own

# What is trained, not how the work is divided: no preset names one, and none that is chosen later takes one away.
TRAINED_AXES = frozenset({"precision", "compile", "clip_norm", "skip_nonfinite"})


def _branch(value: object) -> str:
    return LIST if isinstance(value, list) else NUMBER


def _known_preset(name: str) -> str:
    known = (AUTO, *PRESETS)
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"{name!r:.80} is no preset" + (f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}")
    )


class Prefetch(Section):
    """How far ahead of the computation data is brought, in each of its two steps."""

    load: int | None = Field(
        default=None, ge=1, le=MAX_PREFETCH, description="whole batches loaded ahead; by default 8 small ones, or 2"
    )
    transfer: int = Field(default=2, ge=1, le=MAX_PREFETCH, description="microbatches brought to a device ahead")

    def batches(self, *, are_small: bool) -> int:
        """Loaded ahead: of small ones so many that a loader has several to load each time it wakes, which takes a core
        from a lane for a moment."""
        return self.load or (SMALL_BATCHES if are_small else LEAST_BATCHES)

    @property
    def most_batches(self) -> int:
        """Loaded ahead, of batches of any size."""
        return self.load or SMALL_BATCHES


_NumReplicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
_Replicas = Annotated[list[Replica], Field(min_length=1, max_length=MAX_REPLICAS)]
_NumThreads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
_Bound = Annotated[int, Field(ge=0, le=MAX_STALENESS)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_ScheduleText = Annotated[str, AfterValidator(known_schedule), Field(examples=list(SCHEDULE_NAMES))]
_PresetName = Annotated[
    str, AfterValidator(_known_preset), WithJsonSchema({"type": "string", "enum": [AUTO, *PRESETS]})
]


class Strategy(Section):
    """How to run it: the axes of the plan.

    Errors: `SpecError` that names the axis, the value and the remedy.
    """

    preset: _PresetName | None = Field(
        default=None,
        description="a row of axis values to begin with, axes given here count before it; auto: what is predicted to "
        "be fastest here",
    )
    schedule: _ScheduleText = Field(
        default="1f1b",
        description=f"order of each stage's compute lane: {', '.join(SCHEDULE_NAMES)}, or a grid in a file NAME.grid",
    )
    stages: int = Field(default=1, ge=1, le=MAX_STAGES, description=STAGES)
    stages_per_worker: int | None = Field(
        default=None, ge=1, le=MAX_STAGES, description="of schedule = 'interleaved'; unset: 2"
    )
    split: Split | None = Field(
        default=None,
        description="first unit of each stage but the first, by number or by name; unset balances measured times",
    )
    microbatches: int = Field(default=1, ge=1, le=MAX_MICROBATCHES, description="parts of one batch")
    recompute: bool = Field(default=False, description="keep only stage inputs; run each forward again in backward")
    window: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="tasks sent ahead to each lane; 1 is central dispatch, unset hides dispatch",
    )
    threads: (
        Annotated[
            Annotated[_NumThreads, Tag(NUMBER)] | Annotated[Literal["all"], Tag(WORD)],
            Discriminator(word_or_number),
        ]
        | None
    ) = Field(
        default=None,
        description="compute threads of each CPU worker, which takes the cores of others for them; all: those of the "
        "daemon's CPU workers together, divided among the job's; unset: the daemon's",
    )
    replicas: (
        Annotated[Annotated[_NumReplicas, Tag(NUMBER)] | Annotated[_Replicas, Tag(LIST)], Discriminator(_branch)] | None
    ) = Field(
        default=None,
        description="copies of the model that share each batch: a number of CPU replicas of `stages` stages each, "
        "or a table for each replica; unset is one",
    )
    sync: Literal["coarse", "fine"] = Field(
        default="fine",
        description="fine: each bucket is synchronised once its gradients exist; coarse: all after every backward",
    )
    waits: Literal["layer", "stage"] | None = Field(
        default=None,
        description="stage: a forward waits for all updates of its stage before it begins; layer: for each where it "
        "first reads what was updated; unset: stage, with GPUs whichever is predicted to be faster",
    )
    staleness: Annotated[
        Annotated[_Bound, Tag(NUMBER)]
        | Annotated[list[_Bound], Field(min_length=1, max_length=MAX_REPLICAS), Tag(LIST)],
        Discriminator(_branch),
    ] = Field(default=0, description="iterations that parameters may lag behind; a number, or one for each replica")
    staleness_warmup: int = Field(
        default=0, ge=0, le=MAX_COUNT, description="first training iterations that run with staleness 0"
    )
    update: Literal["local", "cpu", "balanced"] = Field(
        default="local",
        description="where parameters are updated; local: on their stage's device; balanced: divided with the CPU",
    )
    share: Literal["fixed", "adaptive", "stealing"] = Field(
        default="fixed",
        description="a batch goes to the replicas by fixed weights, by measured speed, or to who is free",
    )
    shares: list[_Weight] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_REPLICAS,
        description="a weight for each replica; adaptive shares start there; unset is equal",
    )
    bucket_mib: float = Field(
        default=25.0, gt=0, le=MAX_BUCKET_MIB, allow_inf_nan=False, description="size of a gradient bucket in MiB"
    )
    prefetch: Prefetch = Field(default=Prefetch(), description="how far ahead of the computation data is brought")
    loaders: int = Field(default=1, ge=1, le=MAX_LOADERS, description="processes that load data, microbatches in turn")
    resident: bool = Field(
        default=False, description="data of tensors that are small lie on each GPU, which takes its samples of them"
    )
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="of forward and backward; updates are fp32")
    compile: Annotated[
        Annotated[bool, Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)], Discriminator(word_or_number)
    ] = Field(
        default=False,
        description="run each unit through torch.compile, which makes kernels of it; needs a C++ compiler; auto: "
        "where the job is predicted to end sooner so",
    )
    clip_norm: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="greatest norm of all gradients together; unset: no limit"
    )
    recovery: Literal["iteration", "snapshot", "off"] = Field(
        default="snapshot",
        description="after a lost worker; iteration: the job goes on behind the last iteration that was over, of each "
        "of which there is a copy; snapshot: from a copy that is made now and then; off: it begins again",
    )
    spares: bool | None = Field(
        default=None,
        description="each CPU worker that computes has a copy of itself that takes its place if it is lost, in less "
        "time than it takes to prepare a new one; unset: where the job is predicted to take more than 10 s",
    )
    verify: Literal["digest", "replay", "off"] = Field(
        default="off",
        description="digest: what each update has left is compared with what the next one finds, so that bits that "
        "memory has changed are found; replay: now and then others run an iteration again, and bits are compared",
    )
    replan: bool | None = Field(
        default=None,
        description="a running job goes on with another cut or order of its stages, where what its tasks take says "
        "that it is faster; unset: where the strategy was chosen (preset = 'auto')",
    )
    skip_nonfinite: bool = Field(
        default=False, description="skip the update of an iteration whose gradients are not all finite"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: Any) -> Any:
        """The preset's row under the given table. None counts as not given, as it does on the wire."""
        if not isinstance(given, Mapping) or not isinstance(given.get("preset"), str):
            return given
        preset = PRESETS.get(given["preset"])
        if preset is None:
            return given  # its field says so
        listed = isinstance(given.get("replicas"), list)
        row = {axis: value for axis, value in preset.axes.items() if not (listed and axis in _CUT)}
        return row | {axis: value for axis, value in given.items() if value is not None or axis not in row}

    @model_validator(mode="after")
    def _axes_agree(self) -> Self:
        if isinstance(self.replicas, list):
            self._check_cut_is_given_once(self.replicas)
        check_split(self.split, self.stages)
        num_replicas = len(self.replica_list)
        for axis in ("staleness", "shares"):
            values = getattr(self, axis)
            if isinstance(values, list) and len(values) != num_replicas:
                raise ValueError(
                    f"{axis} = {values!s:.80} has {len(values)} numbers; give {num_replicas}, one for each replica"
                )
        if self.shares is not None and self.share == "stealing":
            raise ValueError(
                "shares cannot stand beside share = 'stealing'; leave shares out or use share = 'adaptive'"
            )
        if self.shares is not None and not any(self.shares):
            raise ValueError(f"shares = {self.shares!s:.80} gives nobody work; give at least one number above 0")
        if any(replica.working_window for replica in self.replica_list):
            self._check_window_streams()
        has_gpus = any(each.device == "gpu" for each in self.replica_list)
        if self.spares and self.recovery == "off":
            raise ValueError(
                "spares = true is for a job that goes on after a lost worker, and with recovery = 'off' it begins "
                "again; leave spares out, or use recovery = 'snapshot'"
            )
        if self.verify == "digest" and self.update != "cpu" and has_gpus:
            raise ValueError(
                f"verify = {self.verify!r} compares what CPU workers update, and with update = {self.update!r} a GPU "
                "updates parameters itself; use update = 'cpu' or verify = 'off'"
            )
        return self

    def _check_window_streams(self) -> None:
        """Parameters and their updates are the host's, and layers take their turns in a fixed order."""
        wanted = {"update": "cpu", "staleness": 0} | ({"share": "fixed"} if self.steals else {})
        for axis, value in wanted.items():
            given = self.staleness_list if axis == "staleness" else [getattr(self, axis)]
            if any(each != value for each in given):
                raise ValueError(
                    f"{axis} = {getattr(self, axis)!r:.80} cannot stand beside a replica with a working_window; use "
                    f"{axis} = {value!r}"
                )

    def _check_cut_is_given_once(self, replicas: list[Replica]) -> None:
        given = " and ".join(axis for axis in _CUT if axis in self.model_fields_set and getattr(self, axis) is not None)
        if not given:
            return
        row = PRESETS.get(self.preset or "")
        listed = row is not None and isinstance(row.axes.get("replicas"), list)
        whose = f"the list of replicas (preset = {self.preset!r} has one)" if listed else "a list of replicas"
        split = {} if self.split is None else {"split": self.split}
        if "stages" in given and all(replica.working_window is not None for replica in replicas):
            example = shown_replicas(replicas, split or {"working_window": 2})
            raise ValueError(
                f"stages cannot stand beside {whose}, where working_window streams the layers of a GPU; leave stages "
                "out, and write in the list working_window, the layers that are there at once, or split, the units "
                f"with which layers begin, for example replicas = {example}"
            )
        num_stages = self.stages if self.split is None else len(self.split) + 1
        example = shown_replicas(replicas, {"stages": num_stages} | split)
        raise ValueError(f"{given} cannot stand beside {whose}; write it in the list, for example replicas = {example}")

    @model_serializer(mode="wrap")
    def _without_what_would_read_as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Their default values, beside a list of replicas, would read as given; and all of them, where it is chosen
        what is not given."""
        table: dict[str, Any] = handler(self)
        if self.is_auto:
            return {axis: table[axis] for axis in table if axis in self.model_fields_set}
        return {axis: table[axis] for axis in table if not (isinstance(self.replicas, list) and axis in _CUT)}

    @property
    def is_auto(self) -> bool:
        """Whether the planner is to choose what is not given; until then all of that has its default."""
        return self.preset == AUTO

    @property
    def is_open(self) -> bool:
        """Whether something of it is chosen by what is measured, before the job has a plan. Whoever loads or plans a
        job has it without."""
        return self.is_auto or self.compile == AUTO

    @property
    def replica_list(self) -> tuple[Replica, ...]:
        """Each replica, in the order in which they divide a batch, with its own number of microbatches; of "all" GPUs
        as few stages as it may come to have."""
        if isinstance(self.replicas, list):
            return tuple(
                replica.on(1).model_copy(update={"microbatches": replica.microbatches or self.microbatches})
                for replica in self.replicas
            )
        return (Replica(stages=self.stages, split=self.split, microbatches=self.microbatches),) * (self.replicas or 1)

    def on(self, num_gpus: int) -> Self:
        """On a machine with so many GPUs: replicas with "all" of them share those that others leave."""
        if not isinstance(self.replicas, list):
            return self
        spread = sum(replica.stages == "all" for replica in self.replicas)
        taken = sum(replica.gpus or replica.num_stages for replica in self.replicas if replica.device == "gpu")
        left = num_gpus - taken + LEAST_OF_ALL * spread
        each = max(1, left // max(1, spread))
        return self.model_copy(update={"replicas": [replica.on(each) for replica in self.replicas]})

    @property
    def may_be_cut(self) -> bool:
        """Whether some replica has several stages or layers, or may come to have them."""
        return self.is_auto or any(each.num_stages > 1 or each.working_window for each in self.replica_list)

    @property
    def may_split_backwards(self) -> bool:
        """Whether a schedule that the job has, or may come to have, may run backwards in two parts."""
        may = self.is_auto or self.schedule in {*SPLITTING, MEASURED} or is_grid(self.schedule)
        return may and self.may_be_cut and self.compile is not True

    @property
    def may_have_replicas(self) -> bool:
        """Whether there are several, or may be."""
        return self.is_auto or len(self.replica_list) > 1

    @property
    def microbatch_counts(self) -> list[int]:
        """Microbatches of each replica's share of a batch."""
        return [replica.microbatches or self.microbatches for replica in self.replica_list]

    @property
    def staleness_list(self) -> list[int]:
        """For each replica, the iterations that its parameters may lag behind once the warm-up is over."""
        if isinstance(self.staleness, list):
            return list(self.staleness)
        return [self.staleness] * len(self.replica_list)

    @property
    def steals(self) -> bool:
        """Whether there is more than one replica to take microbatches from the same batch."""
        return self.share == "stealing" and len(self.replica_list) > 1

    @property
    def division(self) -> tuple[list[float], list[int], str]:
        """Shares, numbers of microbatches and `share`, as `weft.plan.division.divide` takes them at the start.

        Where replicas steal, one part in `microbatches` microbatches: which replica computes one shows as it runs.
        """
        if self.steals:
            return [1.0], [self.microbatches], self.share
        return self.share_list, self.microbatch_counts, self.share

    @property
    def share_list(self) -> list[float]:
        """A weight for each replica, as `weft.plan.division` takes them: they need not add up to 1."""
        return [1.0] * len(self.replica_list) if self.shares is None else list(self.shares)
