"""Placeholders: what stands, in one stage's run of a step, for a tensor that another stage has.

It knows its shape, dtype and device, and an operation on it gives another placeholder, by torch's fake tensors: shapes
are computed, numbers are not. Once the tensor has come over it is `came`, and an operation on it is one on that. Of a
late one the shape is found out when somebody asks for it, or computes with it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from weft.workload.aliases import strides_of
from weft.workload.cutting.leaves import replaced, tensors_in
from weft.workload.cutting.operation import (
    KEEP_IN_BUFFERS,
    TWO_WAYS_OUT,
    asks_for_numbers,
    by_places,
    is_check,
    name_of,
    result_of,
    user_line,
    writes,
)
from weft.workload.cutting.tape import OF_NOBODY_ELSE, Renewed, answered, playing
from weft.workload.workload import WorkloadError

_FAKES = FakeTensorMode(allow_non_fake_inputs=True)
_GETTERS = ("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn")
_CLASSES = ("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn")
_ASKED = ("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex")
KNOWN = {
    getattr(torch.Tensor, name).__get__ for name in (*_GETTERS, *_CLASSES) if hasattr(torch.Tensor, name)
}  # what it can tell by itself
KNOWN |= {getattr(torch.Tensor, name) for name in (*_ASKED, "__len__", "__hash__", "get_device", "is_contiguous")}
KNOWN |= {torch.is_floating_point, torch.is_complex, torch.numel}
_SIZED = ("size", "dim", "ndimension", "stride", "numel", "nelement", "__len__", "is_contiguous")
_OF_SHAPE = {getattr(torch.Tensor, name) for name in _SIZED} | {torch.numel}
_OF_SHAPE |= {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "nbytes")}
_DETACHES = {torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_BY_LENGTHS = ("pack_padded_sequence", "pad_packed_sequence")  # what of it has no numbers is the first it returns
_TOLD = {torch.Tensor.__repr__, torch.Tensor.__format__}


class PlaceholderError(WorkloadError):
    """A number is needed of a tensor that another stage has."""


class CannotSendError(PlaceholderError):
    """A stage is to send what it has not got, or nobody can have elsewhere."""


class Placeholder(Renewed):
    came: torch.Tensor | None
    what: str  # it stands for
    is_late: bool  # the shape that torch knows of it is another one's
    is_asked: bool  # for its shape
    _fake: torch.Tensor | None
    _find: Callable[[], torch.Tensor]  # what its fake is made like, of a late one
    _how: dict[str, Any]  # it is made
    _spare: Placeholder | None  # the one that `again` has given last: to make one takes as long as all the rest

    @staticmethod
    def __new__(cls, fake: torch.Tensor, what: str, *, requires_grad: bool) -> Placeholder:
        how = {"size": fake.shape, "strides": fake.stride(), "dtype": fake.dtype, "device": fake.device}
        return cls._made(fake, what, how | {"requires_grad": requires_grad})

    @classmethod
    def _made(cls, fake: torch.Tensor | None, what: str, how: dict[str, Any]) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(cls, **how)
        made._begin(fake, what)
        made._how = how
        return made

    def _begin(self, fake: torch.Tensor | None, what: str) -> None:
        self._fake, self.came, self.what, self.base, self.is_late = fake, None, what, None, fake is None
        self.is_asked, self.run, self.mark, self._spare = False, playing.run, object(), None

    @classmethod
    def late(
        cls,
        like: torch.Tensor,
        find: Callable[[], torch.Tensor],
        what: str,
        *,
        requires_grad: bool,
        device: torch.device | None = None,
    ) -> Placeholder:
        """like: one of the same dtype. find: one of the same shape and strides too, when that is asked for. device: as
        of `placeholder_of`."""
        how = {"size": like.shape, "dtype": like.dtype, "device": device or torch.device("cpu")}
        made = cls._made(None, what, how | {"requires_grad": requires_grad})
        made._find = find
        return made

    def again(self) -> Placeholder:
        if self.run is None:
            return self
        if (spare := self._spare) is None or sys.getrefcount(spare) > OF_NOBODY_ELSE:
            self._spare = spare = torch.Tensor._make_wrapper_subclass(Placeholder, **self._how)
            spare.__dict__.update(self.__dict__, _spare=None)
        spare.run, spare.came, spare.is_asked = playing.run, None, self.is_asked
        return spare

    @property
    def fake(self) -> torch.Tensor:
        if self._fake is None:
            self._fake = _fake_like(self._find(), self.device)
            del self._find
        return self._fake

    def comes(self, tensor: torch.Tensor) -> None:
        """Errors: PlaceholderError where the step has gone by another shape: of a module that asks for numbers which
        this stage has not, those shapes are known that it returned when it was tried. And where it has to do with what
        the step keeps, of which nobody sends anything."""
        refuse_kept(self)
        if self.is_asked and self.fake.shape != tensor.shape:
            raise PlaceholderError(
                f"{self.what} has the shape {tuple(tensor.shape)}, and the step went by {tuple(self.fake.shape)}, as "
                f"it was when tried: it depends on numbers that another stage has; {TWO_WAYS_OUT}"
            )
        self.came = tensor

    @property
    def is_kept(self) -> bool:
        """From an earlier run than the one that this thread makes."""
        now = playing.run
        return now is not None and self.run is not None and self.run is not now

    @property
    def is_known(self) -> bool:
        """Its shape."""
        return self._fake is not None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = args, kwargs or {}
        if func in KNOWN:
            if func in _OF_SHAPE:
                if args:
                    args[0].is_asked = True
                if not args or args[0].is_late:
                    args, _ = given = replaced(given, sized)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given[1])
        unknown = [each for each in tensors_in(given) if isinstance(each, Placeholder) and each.came is None]
        if not unknown:
            args, kwargs = replaced(given, resolved)
            return func(*args, **kwargs)
        if func in _TOLD:
            return f"<{unknown[0].what}, which another stage has>"
        if (target := _target(func, args, given[1])) is not None:
            unknown.append(_lost(target, func))
        if is_check(func):
            return True
        if func is torch.Tensor.__getitem__:
            given = (args[0], by_places(args[1])), {}
        if playing.redraws and name_of(func) in playing.redraws:
            _draw(func, given)
        if any(each.is_kept for each in unknown):
            return _on_kept(func, given, unknown)
        result = answered(func, given, lambda: _on_fakes(func, given, unknown))
        if playing.lines is not None:
            playing.lines.note(func, given, result)
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        (known, *_) = [each for each in tensors_in((args, kwargs or {})) if isinstance(each, Placeholder)]
        _refuse(known, func)


def sized(tensor: torch.Tensor) -> torch.Tensor:
    """One of which torch knows the shape."""
    if isinstance(tensor, Placeholder) and tensor.is_late:
        return tensor.fake if tensor.came is None else tensor.came
    return tensor


def without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's meta device in its place; whose device stands nowhere."""
    tensor = sized(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, device="meta")


def placeholder_of(
    tensor: torch.Tensor, what: str, *, requires_grad: bool, device: torch.device | None = None
) -> Placeholder:
    """tensor: one of the same shape, strides and dtype. device: that it is on, as the step sees it; the host's."""
    return Placeholder(_fake_like(tensor, device), what, requires_grad=requires_grad)


def _fake_like(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    with _FAKES:
        return torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, device=device or "cpu")


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """What a placeholder stands for, where that has come over."""
    return tensor.came if isinstance(tensor, Placeholder) and tensor.came is not None else tensor


def refuse_kept(tensor: torch.Tensor) -> None:
    """Its numbers are needed. Errors: PlaceholderError."""
    if isinstance(tensor, Placeholder) and tensor.came is None and tensor.is_kept:
        raise PlaceholderError(
            f"{tensor.what} is what the step has kept from an earlier call, or is computed with that, and the stage "
            f"has no numbers of it; {KEEP_IN_BUFFERS}, or cut elsewhere (strategy.split)"
        )


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """What a stage sends for it. Errors: CannotSendError, or PlaceholderError of what is kept."""
    tensor = resolved(tensor)
    refuse_kept(tensor)
    if isinstance(tensor, Placeholder):
        raise CannotSendError(
            f"{tensor.what} is needed by a later stage, and the stage before that has no numbers of it; {TWO_WAYS_OUT}"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise CannotSendError(
            "the stage begins inside of a call of torch.vmap, or of another transform of torch.func, and its tensors "
            "are such in there alone; cut elsewhere (strategy.split), or put that call into one nn.Module"
        )
    return tensor


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """That of which it is a view."""
    if isinstance(tensor, Placeholder):
        return tensor.base
    return tensor._base


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


def _target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A tensor with numbers to which is written what has none."""
    first = kwargs.get("out", args[0] if args else None)
    if not isinstance(first, torch.Tensor) or isinstance(first, Placeholder):
        return None
    return first if "out" in kwargs or writes(func.__name__) else None


def _lost(tensor: torch.Tensor, func: Callable[..., Any]) -> Placeholder:
    """From now on nobody here has its numbers, nor those of which it is a view. It is the same object to the user's
    code, and what comes over takes its place as any placeholder's."""
    base = tensor._base
    for each in (tensor,) if base is None else (base, tensor):
        if isinstance(each, Placeholder):
            continue
        if playing.keeps is not None and playing.keeps(each):
            raise PlaceholderError(
                f"{name_of(func)} at {user_line()} writes to what the model keeps numbers that another stage has; "
                f"{TWO_WAYS_OUT}"
            )
        if playing.lost is not None:
            playing.lost.append((each, type(each)))
        fake = _fake_like(each, each.device)
        each.__class__ = Placeholder
        assert isinstance(each, Placeholder)
        each._begin(fake, result_of(func))
    assert isinstance(tensor, Placeholder)
    if base is not None:
        assert isinstance(base, Placeholder)
        tensor.base = base
    return tensor


@contextlib.contextmanager
def giving_back() -> Iterator[None]:
    """Behind it, tensors that were written to inside what has no numbers have their old ones again: a step may keep
    some, and run as a whole next. Not to be nested."""
    playing.lost = []
    try:
        yield
    finally:
        for tensor, kind in playing.lost:
            tensor.__class__ = kind
            for name in ("_fake", "came", "what", "base", "is_late", "is_asked", "run", "mark", "_spare"):
                tensor.__dict__.pop(name, None)
        playing.lost = None


def _draw(func: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Of the generator what the operation takes that has the numbers, which is a matter of shapes alone."""
    args, kwargs = replaced(given, _without_meaning)
    with torch.no_grad(), contextlib.suppress(Exception):  # of what it makes of no numbers nobody asks
        func(*args, **kwargs)


def _without_meaning(tensor: torch.Tensor) -> torch.Tensor:
    how: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **how) if isinstance(tensor, Placeholder) else tensor


def _on_fakes(func: Callable[..., Any], given: tuple[Any, ...], unknown: Sequence[Placeholder]) -> Any:
    if name_of(func) in _BY_LENGTHS:
        return _by_lengths(func, given)
    if func is torch.autograd.grad:
        return _gradients(*given[0], **given[1])
    of_fake = {id(each.fake): each for each in unknown}
    args, kwargs = replaced(given, _fake)
    needs = torch.is_grad_enabled() and func not in _DETACHES and _any_requires(tensors_in(given))
    try:
        with torch.no_grad(), _no_autocast_cache(), _FAKES:
            result = func(*args, **kwargs)
    except RuntimeError as error:
        if not type(error).__module__.startswith("torch._subclasses"):
            raise
        _refuse(unknown[0], func)
    what = result_of(func)
    bases = {id(_root(each.fake)): each if each.base is None else each.base for each in unknown}

    def wrapped(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, FakeTensor):
            return value
        in_place = of_fake.get(id(value))
        if in_place is not None:
            return in_place
        differs = value.is_floating_point() or value.is_complex()
        made = Placeholder(value, what, requires_grad=needs and differs)
        made.base = bases.get(id(value._base))
        return made

    return replaced(result, wrapped)


def _on_kept(func: Callable[..., Any], given: tuple[Any, ...], unknown: Sequence[Placeholder]) -> Any:
    """Of what an earlier run has left, which is of that run. What is written to is of the run of what is written."""
    args, kwargs = given
    written = kwargs.get("out", args[0] if args and writes(func.__name__) else None)
    run = next((each.run for each in unknown if each.is_kept and each is not written), playing.run)
    result = _on_fakes(func, given, unknown)
    for each in tensors_in((result, written)):
        both = (each, base_of(each)) if each is written else (each,)
        for placeholder in both:
            if isinstance(placeholder, Placeholder) and placeholder.run is not None:
                placeholder.run = run
    return result


def _gradients(outputs: Any, inputs: Any, *args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
    """Of what another stage has differentiated."""
    made = [
        placeholder_of(each, f"a gradient at {user_line()}", requires_grad=create_graph, device=each.device)
        for each in tensors_in(inputs)
    ]
    return tuple(made)


def _by_lengths(func: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Its shapes depend on lengths, which the batch has, so no fake can tell them."""
    args, kwargs = replaced(given, _without_meaning)
    with torch.no_grad():
        rows, lengths = func(*args, **kwargs)
    needs = torch.is_grad_enabled() and _any_requires(tensors_in(given))
    return placeholder_of(rows, result_of(func), requires_grad=needs, device=rows.device), lengths


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """A copy of a real parameter that has no numbers would stand in the cache for one that has."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Placeholder) and tensor.came is None:
        return tensor.fake
    return resolved(tensor).detach()  # of a result torch would ask the gradient, and warn


def _any_requires(tensors: Sequence[torch.Tensor]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return any(each.requires_grad for each in tensors)


def _refuse(unknown: Placeholder, operation: Callable[..., Any]) -> NoReturn:
    raise PlaceholderError(f"{asks_for_numbers(operation, unknown.what)}, which another stage has; {TWO_WAYS_OUT}")
