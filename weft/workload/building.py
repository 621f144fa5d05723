"""Building: a model by its entry function, without memory for the parameters that this process has no use for.

Parameters are numbered as modules get them, which is the same in every process. Whoever knows some of these numbers not
to be needed has their parameters share one place, a *sink*, from the moment in which a module gets them: what the
function fills them with is drawn as ever, so that random numbers go on alike, and then overwritten by what it fills the
next one with. So a function of any class builds with memory for what is needed and for the largest of what is not. What
is needed gets mappings of its own, which the system has back as soon as it is moved elsewhere.

The sink has the values of one parameter at a time. A function that asks for any others (it copies one parameter to
another, or runs the model to make its data) is noticed by torch's function mode, and has to be called again, without a
sink.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from weft.workload.cutting.operation import writes

_numbers: MutableMapping[nn.Parameter, int] = WeakIdKeyDictionary()  # of parameters that are built or being built

LITTLE_BYTES = 32 << 20  # arbitrary: so much more than its own part a worker may have for a moment
SUMMED_WORDS = 1 << 16  # at once: torch sums by a copy of the wider dtype
SMALL_BYTES = 1 << 16  # arbitrary: a parameter of fewer is built where it is

_FILLING = {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_"}
_FILLING |= {"random_", "uniform_", "zero_"}  # whatever was there before; and those of torch.nn.init:
_FILLING |= {"constant_", "dirac_", "eye_", "ones_", "orthogonal_", "sparse_", "trunc_normal_", "zeros_"}
_FILLING |= {"kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"}
_BLIND = {"__get__", "__hash__", "__len__", "requires_grad_"}  # look at no value
_BLIND |= {"dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_inference"}
_BLIND |= {"is_shared", "is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride", "type"}
_BLIND |= {"register_hook", "register_post_accumulate_grad_hook"}
_HANDING_OUT = {"__array__", "__dlpack__", "__reduce_ex__", "data_ptr", "numpy", "share_memory_", "storage"}
_HANDING_OUT |= {"untyped_storage"}  # the memory itself, which may be read at any time
_LIKE = {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}
_LIKE |= {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}


class NeedsValuesError(BaseException):
    """The function asked for values of a parameter that has none. No Exception: its own handlers are not to see it."""


def number_of(parameter: nn.Parameter) -> int | None:
    """None for one that no module was given: a copy, such as the layers of `nn.Transformer`."""
    return _numbers.get(parameter)


def digest_of(parameter: torch.Tensor) -> int | None:
    """Of its bytes, for the same parameter of another process; None for what is not in host memory, or has gaps."""
    if is_lazy(parameter) or not _is_plain(parameter) or not parameter.numel():
        return None
    flat = parameter.detach().as_strided((parameter.numel(),), (1,)).view(torch.uint8)
    words = flat.view(torch.int32) if parameter.nbytes % 4 == 0 else flat
    parts = torch.split(words, SUMMED_WORDS)
    total = sum(number * int(part.sum(dtype=torch.int64)) for number, part in enumerate(parts, 1))
    return total & (1 << 53) - 1  # what a float holds exactly


@contextmanager
def numbered(sink: Sink | None = None) -> Iterator[None]:
    """While a model is built. Errors: NeedsValuesError, where there is a sink."""
    count = 0

    def number(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        if parameter is None or parameter in _numbers:  # the same one again
            return
        _numbers[parameter] = count
        if sink is not None:
            sink.take(parameter, count)
        count += 1

    hook: Callable[..., None] = number
    handle = register_module_parameter_registration_hook(hook)
    try:
        if sink is None:
            yield
        else:
            with _Watch(sink):
                yield
    finally:
        handle.remove()


class Sink:
    """numbers: of the parameters that go into it. num_bytes: of the largest of them."""

    def __init__(self, numbers: Collection[int], num_bytes: int) -> None:
        self._numbers = frozenset(numbers)
        self._memory = _mapped(max(1, num_bytes))
        self._flat: dict[int, torch.Tensor] = {}  # by storage, of which each parameter has one, in the same memory
        self._now: int | None = None  # the storage whose parameter's values are there

    def take(self, parameter: nn.Parameter, number: int) -> None:
        if is_lazy(parameter) or not _is_plain(parameter) or not _is_alone(parameter):
            return
        num_bytes = parameter.nbytes
        if num_bytes < SMALL_BYTES:
            return
        is_unneeded = number in self._numbers and num_bytes <= len(self._memory)
        memory = memoryview(self._memory)[:num_bytes] if is_unneeded else _mapped(num_bytes)
        flat = torch.frombuffer(memory, dtype=parameter.dtype)
        strides = torch.empty_like(parameter, device="meta").stride()
        parameter.data = flat.as_strided(parameter.shape, strides).copy_(parameter.data)
        if is_unneeded:
            self._now = _storage(flat)
            self._flat[self._now] = flat

    def has(self, tensor: object) -> TypeGuard[torch.Tensor]:
        return isinstance(tensor, torch.Tensor) and _is_plain(tensor) and _storage(tensor) in self._flat

    def called(self, name: str, target: object, others: Sequence[torch.Tensor], result: object) -> None:
        """name: of what was called. target: its first argument. others: the rest of those that the sink has. Errors:
        NeedsValuesError."""
        made = [each for each in _leaves(result) if isinstance(each, torch.Tensor)]
        if name in _LIKE or (name in _BLIND and all(map(self.has, made))):
            return
        if name in _HANDING_OUT or (name == "__set__" and others):
            raise NeedsValuesError(name)
        fills = name in _FILLING
        if not (fills or writes(name)):
            if not (made and all(map(self.has, made))):  # views are
                self._check(name, [*filter(self.has, _leaves(target)), *others])
            return
        self._check(name, others)
        for each in filter(self.has, _leaves(target)):
            storage = _storage(each)
            if fills and each.numel() == self._flat[storage].numel():
                self._now = storage
            elif self._now != storage:  # a part, or from what was there: of values that nobody has
                self._now = None

    def _check(self, name: str, read: Sequence[torch.Tensor]) -> None:
        if any(_storage(each) != self._now for each in read):
            raise NeedsValuesError(name)


class _Watch(TorchFunctionMode):
    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        target, *others = [*args, *kwargs.values()] or [None]
        read = list(filter(self._sink.has, _leaves(others)))
        if read or any(map(self._sink.has, _leaves(target))):
            name, _, _ = getattr(func, "__name__", "").partition(".")  # "normal_.default" of torch.ops
            self._sink.called(name, target, read, result)
        return result


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_alone(parameter: nn.Parameter) -> bool:
    """Whether its memory is nobody else's, who might still write to it: a tensor or an array that it was made of."""
    storage = parameter.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users == 2 and storage.resizable()  # the parameter, and this look at it


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.is_cpu


def digests_of(model: nn.Module) -> dict[int, int | None]:
    """Of a large model's parameters, by place, before anything has changed them."""
    parameters = list(model.parameters())
    if sum(parameter.nbytes for parameter in parameters) <= LITTLE_BYTES:
        return {}
    return {place: digest_of(parameter) for place, parameter in enumerate(parameters)}
