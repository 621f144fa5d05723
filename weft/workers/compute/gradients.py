"""Gradients of one stage in buckets: where autograd leaves them, and the milestones posted from inside backward.

The first microbatch's gradient is copied into its place by a hook, and from then on `p.grad` is that place: later
microbatches add to it, without a hook. During the last microbatch's backward the hooks count each bucket's parameters,
and the one that completes a bucket posts its milestone, while backward goes on.

    backward of the last microbatch   ▕ layer 3 ▏▕ layer 2 ▏▕ layer 1 ▏
    milestones                                  ▲ bucket 0       ▲ bucket 1

What has not come by the end of that backward has no gradient in it: `finish` posts those buckets, with zeros in the
places of parameters that got none at all. A parameter that an earlier stage uses too has its gradient there, and none
here: `weft.workers.compute.backward.tied_gradients` hands it on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from weft.plan.buckets import Holder
from weft.workers.compute.backward.freezing import Freezing
from weft.workers.memory.bucket_memory import BucketMemory, shaped_like
from weft.workers.snapshots.first_reads import is_asking
from weft.workload.workload import WorkloadError

Post = Callable[[int], None]


class StageGradients:
    """post: called with a bucket's index once its gradient is complete; from autograd's thread, in backward.

    own: flat tensors of a device, by bucket; without them gradients go to the shared memory of the holder. taken_over:
    each iteration anew from another layer, which has left its numbers between our places.
    """

    def __init__(
        self,
        memory: BucketMemory,
        holder: Holder,
        parameters: Mapping[int, nn.Parameter],
        own: Mapping[int, torch.Tensor] | None,
        post: Post,
        *,
        taken_over: bool = False,
    ) -> None:
        self._memory = memory
        self._holder = holder
        self._buckets = {bucket.index: bucket for bucket in memory.with_gradient(holder)}
        self._post = post
        self._parameters = {
            p.parameter: parameters[p.parameter] for bucket in self._buckets.values() for p in bucket.places
        }
        self.freezing = Freezing(list(self._parameters.values()))
        depth = 1 if own is not None else memory.gradient_depth(holder)
        self._views = [self._places(own, step) for step in range(depth)]
        self._padding = list(self._gaps(own)) if taken_over and own is not None else []
        self._now = self._views[0]
        self._is_last = self._is_only = False
        self._present: set[int] = set()
        self._counted: set[int] = set()  # in the last backward
        self._left: dict[int, int] = {}
        self._hooks = {
            place.parameter: _Hook(self._parameters[place.parameter], self._hook(place.parameter, bucket.index))
            for bucket in self._buckets.values()
            for place in bucket.places
        }

    def _places(self, own: Mapping[int, torch.Tensor] | None, step: int) -> dict[int, torch.Tensor]:
        places = {}
        for bucket in self._buckets.values():
            flat = own[bucket.index] if own is not None else self._memory.gradient(self._holder, bucket, step)
            for place in bucket.places:
                places[place.parameter] = shaped_like(self._parameters[place.parameter], flat, place.offset)
        return places

    def _gaps(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What lies between the places of parameters: it counts in the norm, and is zero."""
        for bucket in self._buckets.values():
            end = 0
            for place in bucket.places:
                if end < place.offset:
                    yield own[bucket.index][end : place.offset]
                end = place.offset + place.num_elements
            if end < bucket.num_elements:
                yield own[bucket.index][end:]

    def begin(self, step: int) -> None:
        """Before the first backward of an iteration."""
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._now = self._views[step % len(self._views)]
        self._present.clear()
        self._counted.clear()
        self._left = {bucket.index: len(bucket.places) for bucket in self._buckets.values()}
        for parameter in self._parameters.values():
            parameter.grad = None
        self._set_hooks()

    def next_backward(self, *, is_last: bool, is_only: bool) -> None:
        """Before each backward. is_last: no other of the iteration follows. is_only: none came before either."""
        self._is_last, self._is_only = is_last, is_only
        if is_last and not is_only:
            self._set_hooks()

    def _set_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.set()

    def _hook(self, index: int, bucket: int) -> Callable[[torch.Tensor], None]:
        # weak: Python's collector does not see what a tensor's hooks hold, and we hold the tensor
        gradients = weakref.ref(self)

        def accumulated(parameter: torch.Tensor) -> None:
            owner = gradients()
            assert owner is not None
            owner._accumulated(parameter, index, bucket)

        return accumulated

    def _accumulated(self, parameter: torch.Tensor, index: int, bucket: int) -> None:
        """autograd's call, once a parameter has all of a backward's gradient."""
        if is_asking():  # a backward of the user's own, between two iterations
            return
        place, gradient = self._now[index], parameter.grad
        if gradient is not place:
            assert gradient is not None
            place.copy_(dense(gradient))
            self._present.add(index)
            parameter.grad = None if self._is_only else place
            if not self._is_last:
                self._hooks[index].remove()
        if self._is_last:
            if index in self._counted:
                raise WorkloadError(
                    f"a parameter of shape {tuple(parameter.shape)} gets its gradient in two parts of one backward, so "
                    "nobody knows when it is complete; give torch.utils.checkpoint use_reentrant=False"
                )
            self._counted.add(index)
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                self._post(bucket)

    def finish(self, bucket: int, step: int) -> None:
        """After the last backward: a bucket that no hook has completed is complete, before it is posted."""
        if self._left[bucket] == 0:
            return
        view = self._buckets[bucket]
        if absent := [p.parameter for p in view.places if p.parameter not in self._present]:
            for index in absent:
                self._now[index].zero_()
            self._memory.mark_missing(self._holder, view, absent, step)


class _Hook:
    """Of one parameter, which may have others: a call of Python from inside backward, so it is set only where it has
    something to do."""

    def __init__(self, parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
        self._call = call
        was_frozen = not parameter.requires_grad  # for now: torch takes hooks of others alone
        parameter.requires_grad_()
        self._key = parameter.register_post_accumulate_grad_hook(call).id  # type: ignore[no-untyped-call]
        parameter.requires_grad_(not was_frozen)
        hooks = parameter._post_accumulate_grad_hooks
        assert hooks is not None
        self._hooks = hooks

    def set(self) -> None:
        self._hooks[self._key] = self._call

    def remove(self) -> None:
        self._hooks.pop(self._key, None)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, which is refused where it is sparse."""
    if gradient.is_sparse:
        raise WorkloadError(
            f"a parameter of shape {tuple(gradient.shape)} gets a sparse gradient, which no bucket takes; build its "
            "nn.Embedding with sparse=False, or train one replica on the CPU without clipping"
        )
    return gradient
