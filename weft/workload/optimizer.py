"""The user's optimizer, with torch's fused kernel where that kernel is known to be right.

A Python loop over parameters is an order of magnitude slower than `fused=True`, and torch never chooses the fused
kernel by itself. The two round differently, so whoever builds an optimizer for a job (the reference loop, a stage's
worker) builds it here: the choice depends on the model's parameters and on the user's arguments alone.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.weak import WeakIdKeyDictionary

from weft.plan.error_places import within
from weft.workload.workload import WorkloadError, kind_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# By where the parameters are. Exact types: a subclass may override `step` and know nothing of fused kernels.
_FUSED_ON_CUDA = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})
_FUSED_ON = {"cpu": _FUSED_ON_CUDA | {torch.optim.Adagrad}, "cuda": _FUSED_ON_CUDA}

# torch 2.13's fused SGD leaves most bfloat16 and float16 parameters untouched (pytorch issue 191763).
_FUSED_DTYPES = frozenset({torch.float32, torch.float64})

_sparse: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()  # whose gradients are, which no fused kernel takes
_made: MutableMapping[torch.optim.Optimizer, bool] = WeakIdKeyDictionary()  # in this process


def note_sparse(model: nn.Module) -> None:
    """Before `make_optimizer` is called with its parameters."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            _sparse[module.weight] = True


def make_optimizer(factory: OptimizerFactory, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Builds the optimizer of a model; None where it has no parameters.

    parameters: all of the model's, also for a stage, which then keeps its own (`keep_alone`): a factory may go by their
    order or number (a rate for each layer), and by names that it has of the whole model.

    Sets `fused=True` in each parameter group where torch has a fused kernel for their device and the user chose neither
    `fused` nor `foreach` (either one given as False keeps torch's plain loop, as it does in torch itself).

    The kernels round differently from the plain loop, so all that is trained must suit them, or nothing gets them.

    Raises WorkloadError if the factory's result cannot be used. What the factory itself raises passes unchanged.
    """
    given = list(parameters)
    if not given:
        return None
    with within("in Workload.optimizer"):
        optimizer = factory(given)
    _check(optimizer, given)
    _made[optimizer] = True
    trained = [parameter for parameter in given if parameter.requires_grad]
    if all(_fits_fused_kernel(optimizer, parameter) for parameter in trained):
        for group in optimizer.param_groups:
            if _can_fuse(group):
                group["fused"] = True
    if type(optimizer) is torch.optim.SGD:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def made_optimizers() -> list[torch.optim.Optimizer]:
    """Those that somebody still has: a user's function may find one in a list, or in an object, where nobody looks."""
    return list(_made)


def keep_alone(optimizer: torch.optim.Optimizer, own: Iterable[nn.Parameter]) -> None:
    """Has it forget all other parameters. Its groups stay, empty ones too: a scheduler counts them. One that keeps
    tensors by place keeps the others in their places, without gradients."""
    kept = {id(parameter) for parameter in own}
    for group in [] if tensors_by_place(optimizer) else optimizer.param_groups:
        names = group.get("param_names", group["params"])
        both = [pair for pair in zip(group["params"], names, strict=True) if id(pair[0]) in kept]
        group["params"] = [parameter for parameter, _ in both]
        if "param_names" in group:
            group["param_names"] = [name for _, name in both]
    for parameter in [each for each in optimizer.state if id(each) not in kept]:
        del optimizer.state[parameter]  # Adagrad makes its state where it is built


def tensors_by_place(optimizer: torch.optim.Optimizer) -> str | None:
    """The attribute in which it keeps tensors of its own beside its state, to be found by a parameter's place, as in
    `zip(group["params"], self.slow)`; None where it has none. Those of an optimizer inside of it count, too."""
    standard = vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)).keys()
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    seen: set[int] = set()

    def has_some(value: object) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) not in given and value.dim() > 0
        if id(value) in seen:
            return False
        seen.add(id(value))
        match value:
            case dict():
                return any(map(has_some, value.values()))
            case list() | tuple() | set() | deque():
                return any(map(has_some, value))
            case torch.optim.Optimizer():
                return tensors_by_place(value) is not None
        return False

    own = {name: value for name, value in vars(optimizer).items() if name not in standard}
    return next((name for name, value in own.items() if has_some(value)), None)


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of `make_optimizer`'s that is given found_inf changes nothing where that is 1.0.

    So do the fused kernels. Not where something of the user's hangs on `step`: it would be called, too. And a dampened
    momentum would begin with a skipped step as memory that nobody has written.
    """
    return (
        type(optimizer) in _FUSED_ON["cpu"]
        and not has_hooks(optimizer)
        and all(group["fused"] and not _is_dampened(group) for group in optimizer.param_groups)
    )


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Of the user's, around its step."""
    return hook_of(optimizer) is not None


def options_of(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What its groups have beside parameters, as it is now, by what people call it. None: of a job that only runs."""
    return {
        f"param_groups[{number}][{key!r}]": copy.copy(value)
        for number, group in enumerate(() if optimizer is None else optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Of its first group; 0 of one that has none, as where it finds its own in each step (Adafactor with lr=None)."""
    rate = optimizer.param_groups[0].get("lr")
    return 0.0 if rate is None else float(rate)


def hook_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The user's hook around its step, the first of several, by what has registered it; those around the step of every
    optimizer are some, too."""
    given: Mapping[str, Mapping[int, Any]] = {
        "register_step_pre_hook": getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        "register_step_post_hook": getattr(optimizer, "_optimizer_step_post_hooks", {}),
        "register_optimizer_step_pre_hook": _global_optimizer_pre_hooks,
        "register_optimizer_step_post_hook": _global_optimizer_post_hooks,
    }
    found = ((by, hook) for by, hooks in given.items() for hook in hooks.values() if hook is not _begin_momentum)
    return next((f"{by}({getattr(hook, '__qualname__', type(hook).__name__):.80})" for by, hook in found), None)


def _is_dampened(group: dict[str, Any]) -> bool:
    return bool(group.get("momentum") and group.get("dampening"))


def _begin_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused SGD of torch 2.13 raises TypeError where a parameter has its first gradient after others have had theirs.

    A momentum of zeros gives the first step that torch's loop makes, as long as there is no dampening.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _check(optimizer: object, given: list[nn.Parameter]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        example = "for example lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        if isinstance(optimizer, Mapping):
            inside = (key for key, each in optimizer.items() if isinstance(each, torch.optim.Optimizer))
            if (key := next(inside, None)) is not None:
                example = f"which is in it as [{key!r}]; a scheduler is given as Workload.scheduler"
        raise WorkloadError(
            f"Workload.optimizer returned {kind_of(optimizer)}; it must return a torch.optim.Optimizer, {example}"
        )
    if isinstance(optimizer, torch.optim.LBFGS) or _has_to_have_closure(optimizer):
        raise _needs_closure(optimizer)
    known = {id(parameter) for parameter in given}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError(
            "Workload.optimizer returned an optimizer of other parameters than it was given; "
            "build it on its argument, the parameters of Workload.model as this process has it (a loss with parameters "
            "that are trained is a part of the model, and Workload.step calls it)"
        )


@contextlib.contextmanager
def without_closure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around the first calls of its step. Raises WorkloadError in the place of what a step raises for want of a
    closure (SAM, and what is written as it is, asserts that there is one)."""
    try:
        yield
    except Exception as error:
        calls_none = "'NoneType' object is not callable" in str(error) and "closure" in _arguments_of_step(optimizer)
        if "closure" in str(error).lower() or calls_none:
            raise _needs_closure(optimizer) from error
        raise


def _needs_closure(optimizer: torch.optim.Optimizer) -> WorkloadError:
    return WorkloadError(
        f"Workload.optimizer returned {type(optimizer).__name__}, which runs the model again within one step; "
        "use an optimizer whose step needs no closure, for example torch.optim.Adam"
    )


def _has_to_have_closure(optimizer: torch.optim.Optimizer) -> bool:
    argument = _arguments_of_step(optimizer).get("closure")
    return argument is not None and argument.default is argument.empty


def _arguments_of_step(optimizer: torch.optim.Optimizer) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(optimizer.step).parameters
    except (TypeError, ValueError):  # of a callable that tells nothing
        return {}


def _can_fuse(group: dict[str, Any]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    forbidden = group.get("differentiable", False) or group.get("capturable", False)
    tensor_settings = any(
        isinstance(part, torch.Tensor)
        for name, value in group.items()
        if name != "params"
        for part in (value if isinstance(value, tuple) else (value,))
    )
    dampened = _is_dampened(group)  # see _begin_momentum
    return not (chosen or forbidden or tensor_settings or dampened)


def _fits_fused_kernel(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """The kernels walk raw memory: a parameter with odd strides would meet the wrong elements of its gradient."""
    return (
        type(parameter) in (torch.Tensor, nn.Parameter)
        and type(optimizer) in _FUSED_ON.get(parameter.device.type, ())
        and parameter.dtype in _FUSED_DTYPES
        and parameter.is_contiguous()
        and parameter not in _sparse
    )


def nothing_to_train(model: nn.Module) -> str:
    """The error, with layers that are not the model's because nothing but a list or a dict of Python has them."""
    text = "Workload.model has no parameter that requires a gradient; there is nothing to train"
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if key.startswith("_") or not any(isinstance(part, nn.Module) for part in parts):
                continue
            kind = "Dict" if isinstance(value, dict) else "List"
            return (
                f"{text}. {f'{name}.{key}'.lstrip('.')!r} is a {type(value).__name__} of modules, which the model does "
                f"not know of; make it an nn.Module{kind}"
            )
    return text
