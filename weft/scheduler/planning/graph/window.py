"""Window graph: tasks and edges of a replica whose layers stream through its GPU. Pure.

The GPU has places for the parameters and gradients of W layers; layer s has place s % W. All microbatches go through a
layer before the next one's turn, so a layer comes up once for its forwards and, unless it is still there, once for its
backwards. With four layers and W = 2:

    compute   F0   F1   F2   F3   B3   B2   B1   B0
    h2d     ▕U1▏▕U0▏   ▕U2▏ ▕U3▏          ▕R1▏ ▕R0▏       U: UP, once the host has updated the layer   R: RELOAD
    place 0   └ 0 ┴─────┘└─ 2 ──────────┘     └ 0 ─┘      a layer is never brought down: the host has it
    place 1        └ 1 ──────┘└─ 3 ───┘ └── 1 ──┘
    d2h                              ▕D3▏ ▕D2▏ ▕D1▏ ▕D0▏

A gradient's place is free again once it is down. After Sun et al., STRONGHOLD, SC 2022; all microbatches before the
next layer: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan.buckets import Bucket, Holder
from weft.plan.graph import Key, backward, down, forward, grad, reload, up
from weft.plan.kinds import Cause, Kind
from weft.plan.placement import DOWN, UP
from weft.scheduler.planning.graph.pipeline import GraphBuilder


class WindowGraph:
    """held: the buckets of a layer. completions: the tasks after which one's parameters stand where they are shared."""

    def __init__(
        self,
        builder: GraphBuilder,
        replica: int,
        *,
        held: Callable[[int, int], Sequence[Bucket]],
        completions: Callable[[Bucket], list[Key]],
    ) -> None:
        plan = builder.placement.replicas[replica]
        assert plan.working_window is not None
        self._builder = builder
        self._r = replica
        self._num_layers = plan.num_stages
        self._microbatches = plan.microbatches
        self._window = plan.working_window
        self._held = held
        self._completions = completions

    def tasks(self) -> None:
        layers = range(self._num_layers)
        for s in layers:
            self._compute(Kind.FORWARD, s)
        for s in reversed(layers):
            self._compute(Kind.BACKWARD, s)
            self._of_buckets(Kind.GRAD, self._with_gradient(s), s)
        for s in [*reversed(layers[: self._window]), *layers[self._window :]]:  # the first ones as they are updated
            self._of_buckets(Kind.UP, self._held(self._r, s), s, UP)
        for s in reversed(layers):
            if self._makes_room(s):
                self._of_buckets(Kind.RELOAD, self._held(self._r, s), s, UP)
            self._of_buckets(Kind.DOWN, self._with_gradient(s), s, DOWN)

    def edges(self) -> None:
        for s in range(self._num_layers):
            for part in self._with_gradient(s):
                self._gradient_goes_down(s, part.index)
            for part in self._held(self._r, s):
                self._parameters_come_up(s, part)

    def _with_gradient(self, s: int) -> list[Bucket]:
        """Of the buckets of a layer; one that an earlier layer has, too, has its gradient there."""
        return [part for part in self._held(self._r, s) if (self._r, s) in part.gradient_holders]

    def _makes_room(self, s: int) -> bool:
        """Whether another layer takes its place between its forwards and its backwards."""
        return s + self._window < self._num_layers

    def _compute(self, kind: Kind, s: int) -> None:
        for m in range(self._microbatches):
            self._builder.add(Key(kind, self._r, s, m), self._builder.lane(self._r, s))

    def _of_buckets(self, kind: Kind, buckets: Sequence[Bucket], s: int, lane: str | None = None) -> None:
        for part in buckets:
            self._builder.add(Key(kind, self._r, s, bucket=part.index), self._builder.lane(self._r, s, lane))

    def _gradient_goes_down(self, s: int, b: int) -> None:
        r = self._r
        self._builder.edge(self._builder.last_backward[Holder(r, s)], grad(r, s, b), 0, Cause.GRADIENT)
        self._builder.edge(grad(r, s, b), down(r, s, b), 0, Cause.GRADIENT)
        distance, following = (0, s - self._window) if s >= self._window else (1, self._top(s))
        self._builder.edge(down(r, s, b), backward(r, following, 0), distance, Cause.SLOT)

    def _parameters_come_up(self, s: int, part: Bucket) -> None:
        r, b = self._r, part.index
        for key in self._completions(part):
            self._builder.edge(key, up(r, s, b), 1, Cause.UPDATE)
        self._builder.edge(up(r, s, b), forward(r, s, 0), 0, Cause.UPDATE)
        if s >= self._window:
            self._builder.edge(forward(r, s - self._window, self._microbatches - 1), up(r, s, b), 0, Cause.SLOT)
        else:
            self._builder.edge(self._builder.last_backward[Holder(r, s)], up(r, s, b), 1, Cause.SLOT)
        if self._makes_room(s):
            self._builder.edge(self._builder.last_backward[Holder(r, s + self._window)], reload(r, s, b), 0, Cause.SLOT)
            self._builder.edge(reload(r, s, b), backward(r, s, 0), 0, Cause.UPDATE)

    def _top(self, s: int) -> int:
        """The last layer of those that have the place of s."""
        return self._num_layers - 1 - (self._num_layers - 1 - s) % self._window
