"""Split: a stage's backward in two parts, first what the stage before waits for, then what its own update needs.

    roots ──▶ n ──▶ n ──▶ … ──▶ what was received        first: the path, without the parameters' parts
              │     │
              ▼     ▼
              p     p                                    then: from each border node n to its own parameters

Both parts run on the graph that forward has left. In the first autograd runs the nodes that lead to what was received,
and keeps the gradient that comes to each *border node*: one on the path, with parameters beside it. In the second it
runs each border node again, for these parameters alone. Each kernel gets what it gets in a whole backward, so the bits
are the same.

A parameter beside several border nodes, or whose gradient goes on to another stage, has its gradient in the first part,
where autograd sums it in its own order; in the second it is added to `p.grad`. So has one of a kernel that cannot make
the parameters' gradients without the others, one of a node that may not run twice (`once`), and a border's that are all
vectors, as a norm's: a sum of what passes there costs less than another call of autograd, if no function of the user's
stands between. Where nothing that was received has a gradient, the second part is the whole backward. After Qi et al.,
Zero Bubble Pipeline Parallelism, ICLR 2024; torch's own pipelines split in a like way.

What is added to the kernels' time, on caches that these have emptied, is most of what a split costs. So the graph is
walked once, and the engine is called as torch.autograd calls it, without the checks of shapes that it makes before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from weft.workers.compute.backward.once import differs_again, runs_forward_again

_run_engine = torch.autograd.Variable._execution_engine.run_backward
_LEAF: Any = type(get_gradient_edge(torch.zeros(0, requires_grad=True)).node)  # AccumulateGrad
_AT_ONCE = {"NativeGroupNormBackward0"}  # ends the process where the input's gradient is not wanted, in channels-last

_Edges = tuple[tuple[Node | None, int], ...]


@dataclass(frozen=True, slots=True)
class _Border:
    edges: tuple[GradientEdge, ...]  # that lead to it
    parameters: tuple[torch.Tensor, ...]  # that its gradient goes to beside the path, and to no other border's


class SplitBackward:
    """Makes the first part; `finish` makes the second."""

    def __init__(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        received: Mapping[int, torch.Tensor],
        handed_on: Collection[torch.Tensor] = (),
    ) -> None:
        """received: what the graph begins with, by number. handed_on: parameters whose gradients go on to another
        stage: `p.grad` has them after the first part, and the second leaves them alone."""
        self._whole = (roots, gradients)
        graph = _Graph([get_gradient_edge(root) for root in roots], [get_gradient_edge(x) for x in received.values()])
        shared = graph.shared(handed_on)
        self._borders = graph.borders(shared)
        self._is_split = graph.has_path or bool(shared)
        edges = [edge for border in self._borders for edge in border.edges]
        wanted: list[Any] = [*received.values(), *shared, *edges]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if self._is_split:
            found = torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
        of_received, of_shared = found[: len(received)], found[len(received) : len(received) + len(shared)]
        self.received = dict(zip(received, of_received, strict=True))  # gradients by number; None: none has come
        self._came = dict(zip(edges, found[len(received) + len(shared) :], strict=True))
        self._summed = [(p, g) for p, g in zip(shared, of_shared, strict=True) if g is not None]
        self._hand_on(handed_on)

    def _hand_on(self, parameters: Collection[torch.Tensor]) -> None:
        numbers = {id(parameter) for parameter in parameters}
        for parameter, gradient in self._summed:
            if id(parameter) in numbers:
                parameter.grad = gradient
        self._summed = [pair for pair in self._summed if id(pair[0]) not in numbers]

    def finish(self) -> None:
        """To be called once."""
        if not self._is_split:
            torch.autograd.backward(*self._whole)
        for border in self._borders if self._is_split else ():
            came = [(edge, gradient) for edge in border.edges if (gradient := self._came[edge]) is not None]
            if came:
                edges, gradients = zip(*came, strict=True)
                inputs, options = border.parameters, {"allow_unreachable": True, "accumulate_grad": True}
                _run_engine(edges, gradients, False, False, inputs, **options)  # no graph kept, none made
        for parameter, gradient in self._summed:
            _accumulate(parameter, gradient)


class _Graph:
    """What autograd would run: the nodes, and which of them lead to what was received."""

    def __init__(self, roots: Sequence[GradientEdge], received: Sequence[GradientEdge]) -> None:
        self._roots = tuple((edge.node, edge.output_nr) for edge in roots)
        self._below = _found([node for node, _ in self._roots])
        path = {edge.node for edge in received}
        beside: dict[Node, list[torch.Tensor]] = {}  # by node, the parameters behind it that no path leads to
        for node, below in self._below.items():
            own: list[torch.Tensor] = []
            for child, _ in below:
                if child in path:
                    path.add(node)
                elif child in beside:
                    own += beside[child]
            if isinstance(node, _LEAF) and node not in path:
                own.append(node.variable)
            if own:
                beside[node] = _once(own) if len(own) > 1 else own
        self.has_path = not path.isdisjoint(self._below)
        starts = path.union(node for node, _ in self._roots)
        self._borders = [(node, beside[node]) for node in reversed(beside) if node in starts]
        self._behind_borders = [
            (node, own) for node, own in beside.items() if node not in starts and not isinstance(node, _LEAF)
        ]

    def shared(self, handed_on: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters beside several borders, those that are handed on, those that a first part makes with ease, and
        those behind a node that would run in both parts and may not."""
        counts: dict[int, int] = {}
        for _, beside in self._borders:
            for parameter in beside:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
        wanted = {id(parameter) for parameter in handed_on}
        wanted.update(number for number, count in counts.items() if count > 1)
        functions = (own for node, own in self._behind_borders if isinstance(node, BackwardCFunction))
        of_functions = {id(parameter) for own in functions for parameter in own}
        for node, beside in self._borders if self.has_path else ():
            sums = (parameter.dim() <= 1 and id(parameter) not in of_functions for parameter in beside)
            if node.name() in _AT_ONCE or all(sums):
                wanted.update(map(id, beside))
        if self.has_path or wanted:
            self._want_what_runs_once(wanted)
        return _once([p for _, beside in self._borders for p in beside if id(p) in wanted])

    def _want_what_runs_once(self, wanted: set[int]) -> None:
        """Adds parameters, by id. Behind a border a node runs in the second part alone, unless it leads to what the
        first one makes, too."""
        for nodes, runs_twice in (self._borders, differs_again), (self._behind_borders, runs_forward_again):
            for node, own in nodes:
                numbers = {id(p) for p in own}
                if not numbers <= wanted and runs_twice(node):
                    wanted |= numbers
        parts = [{id(p) for p in own} for node, own in self._behind_borders if len(own) > 1 and differs_again(node)]
        size = -1
        while size < len(wanted):  # what one has added may be another's, too
            size = len(wanted)
            wanted.update(*(part for part in parts if not wanted.isdisjoint(part)))

    def borders(self, shared: Collection[torch.Tensor]) -> list[_Border]:
        """Of the other parameters; those of later computations first."""
        numbers = {id(parameter) for parameter in shared}
        kept = ((node, [p for p in beside if id(p) not in numbers]) for node, beside in self._borders)
        own = {node: parameters for node, parameters in kept if parameters}
        into: dict[Node, dict[int, None]] = {node: {} for node in own}  # numbers of outputs that a gradient comes to
        for edges in (self._roots, *self._below.values()):
            for child, number in edges:
                if child in into:
                    into[child][number] = None
        return [_Border(tuple(GradientEdge(node, n) for n in into[node]), tuple(own[node])) for node in own]


def _found(roots: Sequence[Node]) -> dict[Node, _Edges]:
    """What is behind each node. Depth first, and each behind all that it leads to."""
    seen: dict[Node, _Edges] = {}
    nodes: dict[Node, _Edges] = {}
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node in seen:
            nodes[stack.pop()] = seen[node]
        else:
            below = seen[node] = node.next_functions
            stack += [child for child, _ in below if child is not None and child not in seen]
    return nodes


def _once(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does. The hooks that change a gradient have run on this one, where it was summed."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad += gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):  # one may remove itself
        hook(parameter)
