from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.optimizer import (
    can_skip_on_device,
    hook_of,
    keep_alone,
    learning_rate_of,
    make_optimizer,
    note_sparse,
    tensors_by_place,
    without_closure,
)
from weft.workload.workload import WorkloadError

FUSED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 7), (5,), (3, 100))]


def factory(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda given: cls(given, **settings)


def fused(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    assert optimizer is not None
    return [group.get("fused") for group in optimizer.param_groups]


def after_steps(optimizer: torch.optim.Optimizer, given: list[nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in given:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in given]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_kernel_is_chosen_and_computes_what_the_plain_loop_computes(name: str, dtype: torch.dtype) -> None:
    cls, settings = FUSED[name]
    ours, plain = parameters(dtype), parameters(dtype)
    optimizer = make_optimizer(factory(cls, **settings), ours)
    assert optimizer is not None
    assert fused(optimizer) == [True]
    expected = after_steps(cls(plain, **settings), plain)
    torch.testing.assert_close(after_steps(optimizer, ours), expected)


@pytest.mark.parametrize("name", FUSED)
def test_stages_with_an_optimizer_each_end_with_the_bits_of_one_optimizer_for_all(name: str) -> None:
    cls, settings = FUSED[name]
    together, apart = parameters(), parameters()
    whole = make_optimizer(factory(cls, **settings), together)
    assert whole is not None
    expected = after_steps(whole, together)
    generator = torch.Generator().manual_seed(1)
    stages = [make_optimizer(factory(cls, **settings), part) for part in (apart[:1], apart[1:])]
    for _ in range(3):
        for parameter in apart:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for stage in stages:
            assert stage is not None
            stage.step()
    assert all(torch.equal(a, b) for a, b in zip(apart, expected, strict=True))


ODD: dict[str, Callable[[], nn.Parameter]] = {
    "not contiguous": lambda: nn.Parameter(torch.ones(6, 4).t()),
    "in channels-last order": lambda: nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    "of low precision": lambda: nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
    "complex": lambda: nn.Parameter(torch.ones(4, dtype=torch.complex64)),
    "with sparse gradients": lambda: _sparse(nn.Embedding(4, 2, sparse=True)),
}


def _sparse(embedding: nn.Embedding) -> nn.Parameter:
    note_sparse(embedding)
    return embedding.weight


@pytest.mark.parametrize("odd", ODD)
def test_a_stages_kernel_is_the_whole_models_wherever_it_is_cut(odd: str) -> None:
    """One parameter turned the fused kernel off for its group, and groups differ by stage: off by 5e-17."""
    whole = [*parameters(), ODD[odd]()]
    for stage in (whole, whole[:1], whole[1:3], whole[3:]):
        assert fused(of_stage(factory(torch.optim.Adam), whole, stage)) == [None]
    frozen = [*parameters(), ODD[odd]().requires_grad_(False)]
    assert fused(of_stage(factory(torch.optim.Adam), frozen, frozen[:1])) == [True], "it is never updated"


def of_stage(build: Any, whole: list[nn.Parameter], own: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = make_optimizer(build, whole)
    assert optimizer is not None
    keep_alone(optimizer, own)
    return optimizer


@pytest.mark.parametrize(
    "build",
    [
        lambda given: torch.optim.SGD([{"params": [p], "lr": 0.1 * 2**-n} for n, p in enumerate(given)]),
        lambda given: torch.optim.Adagrad([(f"layer.{n}", p) for n, p in enumerate(given)], lr=1 / len(list(given))),
    ],
)
def test_a_stage_has_of_the_models_optimizer_its_own_parameters_alone(build: Any) -> None:
    """It had called the function with its own, and a rate for each layer was another one in every stage."""
    whole = parameters()
    expected, own = make_optimizer(build, whole), of_stage(build, whole, whole[1:])
    assert expected is not None
    assert [group["lr"] for group in own.param_groups] == [group["lr"] for group in expected.param_groups]
    assert {id(each) for group in own.param_groups for each in group["params"]} == set(map(id, whole[1:]))
    assert set(map(id, own.state)) <= set(map(id, whole[1:]))
    for parameter in whole:
        parameter.grad = torch.ones_like(parameter)
    before = whole[0].detach().clone()
    own.step()
    assert torch.equal(whole[0], before)
    assert not torch.equal(whole[1], torch.zeros_like(whole[1]))


class Beside(torch.optim.SGD):
    """Keeps something in an attribute."""

    def __init__(self, given: Iterable[nn.Parameter], kept: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__(given, lr=0.1)
        self.kept = kept(self.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("kept", "is_by_place"),
    [
        (lambda given: [each.detach().clone() for each in given], True),
        (lambda given: {each: [each.detach().clone()] for each in given}, True),
        (lambda given: deque([torch.zeros_like(each) for each in given]), True),
        (lambda given: Beside(given, lambda them: (torch.ones(len(them)),)), True),
        (list, False),
        (lambda given: torch.optim.Adam(given), False),
        (lambda given: {"steps": torch.tensor(0.0), "name": "mine", "given": given}, False),
    ],
)
def test_a_stage_keeps_all_places_where_an_optimizer_keeps_tensors_by_them(kept: Any, is_by_place: bool) -> None:
    given = parameters()
    optimizer = Beside(given, kept)
    assert tensors_by_place(optimizer) == ("kept" if is_by_place else None)
    keep_alone(optimizer, given[1:2])
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [
        id(each) for each in (given if is_by_place else given[1:2])
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"fused": False},
        {"foreach": False},
        {"foreach": True},
        {"differentiable": True},
        {"capturable": True},
        {"lr": torch.tensor(0.1)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_user_chose_or_the_kernel_forbids_is_left_alone(settings: dict[str, Any]) -> None:
    optimizer = make_optimizer(factory(torch.optim.Adam, **settings), parameters())
    assert fused(optimizer) == [settings.get("fused")]


def test_each_parameter_group_is_decided_by_itself() -> None:
    def build(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *rest = given
        return torch.optim.AdamW([{"params": [first], "fused": False}, {"params": rest, "weight_decay": 0.0}])

    assert fused(make_optimizer(build, parameters())) == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_with_the_plain_loop(dtype: torch.dtype) -> None:
    """torch's fused SGD on the CPU skipped whole vectors of bfloat16 and float16 parameters (pytorch issue 191763)."""
    given = parameters(dtype)
    before = [parameter.detach().clone() for parameter in given]
    optimizer = make_optimizer(factory(torch.optim.SGD, lr=0.1), given)
    assert optimizer is not None
    after = after_steps(optimizer, given)
    assert all((new != old).float().mean() > 0.9 for new, old in zip(after, before, strict=True))


def test_a_parameter_with_strides_of_its_own_stays_with_the_plain_loop() -> None:
    """The fused kernels go by address: parameter and gradient of different strides were paired wrongly, silently."""
    given = [nn.Parameter(torch.randn(6, 4).t())]
    assert fused(make_optimizer(factory(torch.optim.SGD, lr=0.1), given)) == [None]


def test_an_optimizer_without_a_fused_kernel_is_used_as_it_is() -> None:
    optimizer = make_optimizer(factory(torch.optim.Adamax), parameters())
    assert optimizer is not None
    assert "fused" not in optimizer.param_groups[0]


def test_on_a_device_that_torch_has_no_fused_kernel_for_it_is_used_as_it_is() -> None:
    on_device = [nn.Parameter(parameter.to("meta")) for parameter in parameters()]
    assert fused(make_optimizer(factory(torch.optim.Adagrad), on_device)) == [None]


def test_a_subclass_is_used_as_it_is_since_its_step_may_be_its_own() -> None:
    class Own(torch.optim.SGD):
        pass

    assert fused(make_optimizer(factory(Own), parameters())) == [None]


def test_without_parameters_there_is_no_optimizer() -> None:
    def build(given: object) -> torch.optim.Optimizer:
        raise AssertionError("torch's optimizers refuse an empty list")

    assert make_optimizer(build, iter([])) is None


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda given: "adam", "Workload.optimizer returned str; it must return a torch.optim.Optimizer"),
        (
            lambda given: {"optimizer": torch.optim.SGD(given)},
            r"returned dict; it must return a torch.optim.Optimizer, which is in it as \['optimizer'\]; a scheduler is",
        ),
        (lambda given: torch.optim.LBFGS(given), "LBFGS.*use an optimizer whose step needs no closure"),
        (lambda given: OwnClosure(given, lr=1), "OwnClosure.*use an optimizer whose step needs no closure"),
        (lambda given: torch.optim.SGD([*given, *parameters()]), "of other parameters.*build it on its argument"),
    ],
    ids=["no optimizer", "in a dict", "closure", "closure of its own", "other parameters"],
)
def test_a_factory_that_cannot_be_used_is_refused_by_name_with_a_remedy(build: Callable[..., Any], text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        make_optimizer(build, parameters())


class OwnClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]  # as in loops that hand it one
        return closure()


def _asserted(closure: Any = None) -> None:
    assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


def _called(closure: Any = None) -> None:
    closure()


def _other(closure: Any = None) -> None:
    raise ValueError("no such state")


@pytest.mark.parametrize("step", [_asserted, _called])
def test_a_step_that_fails_for_want_of_a_closure_is_refused_as_lbfgs_is(step: Callable[..., None]) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.step = step  # type: ignore[method-assign]  # as a class of its own has it
    with pytest.raises(WorkloadError, match=r"SGD.*use an optimizer whose step needs no closure"):  # noqa: SIM117
        with without_closure(optimizer):
            optimizer.step()


def test_what_else_a_step_raises_passes_unchanged() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.step = _other  # type: ignore[method-assign]  # as a class of its own has it
    with pytest.raises(ValueError, match="no such state"), without_closure(optimizer):
        optimizer.step()


def test_what_the_factory_raises_passes_unchanged() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        make_optimizer(factory(torch.optim.Adam, lr=-1), parameters())


def test_fused_momentum_takes_a_parameter_whose_gradient_comes_later_than_others() -> None:
    """torch 2.13's fused SGD raises TypeError for it; its plain loop begins that parameter's momentum then."""

    def trained(**how: Any) -> list[torch.Tensor]:
        given = parameters()
        optimizer = make_optimizer(factory(torch.optim.SGD, lr=0.1, momentum=0.9, **how), given)
        assert optimizer is not None
        for step in range(3):
            for number, parameter in enumerate(given):
                parameter.grad = torch.full_like(parameter, 0.5) if step or number == 0 else None
            optimizer.step()
        return [parameter.detach() for parameter in given]

    for ours, plain in zip(trained(), trained(foreach=False, fused=False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)


class Derived(torch.optim.AdamW):
    """Nobody knows what it does with what it is given."""


@pytest.mark.parametrize("name", FUSED)
def test_a_device_can_leave_out_a_step_of_a_fused_kernel(name: str) -> None:
    cls, settings = FUSED[name]
    optimizer = make_optimizer(factory(cls, **settings), parameters())
    assert optimizer is not None
    assert can_skip_on_device(optimizer)
    optimizer.register_step_post_hook(lambda *given: None)
    assert not can_skip_on_device(optimizer), "what hangs on the step would be called"


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "fused": True}),
        (torch.optim.RMSprop, {}),
        (Derived, {"fused": True}),
    ],
)
def test_a_step_that_counts_on_the_host_or_that_nobody_knows_is_left_out_by_the_host(
    cls: Any, settings: dict[str, Any]
) -> None:
    optimizer = make_optimizer(factory(cls, **settings), parameters())
    assert optimizer is not None
    assert not can_skip_on_device(optimizer)


def mean(*given: Any) -> None:
    """A hook."""


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_users_around_a_step_is_told_by_what_has_registered_it(name: str) -> None:
    optimizer = make_optimizer(factory(torch.optim.SGD, lr=0.1, momentum=0.9), parameters())
    assert optimizer is not None
    assert hook_of(optimizer) is None, "of SGD there is one of ours"
    of_all = getattr(sys.modules["torch.optim.optimizer"], name.replace("step", "optimizer_step"))
    for register in (getattr(optimizer, name), of_all):
        handle = register(mean)
        assert hook_of(optimizer) == f"{register.__name__}(mean)"
        handle.remove()
    assert hook_of(optimizer) is None


@pytest.mark.parametrize(("given", "told"), [({}, 0.0), ({"lr": None}, 0.0), ({"lr": torch.tensor(0.5)}, 0.5)])
def test_an_optimizer_without_a_rate_of_its_own_tells_none(given: dict[str, Any], told: float) -> None:
    """transformers' Adafactor has lr=None unless one is given: each step finds its own."""
    assert learning_rate_of(torch.optim.Optimizer(parameters(), given)) == told


class Around(torch.optim.Optimizer):
    """Another one, without a call of torch's constructor, as many a Lookahead is written."""

    def __init__(self, given: Any) -> None:
        self.inner = torch.optim.SGD(given, lr=0.1)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults


def test_an_optimizer_that_has_not_called_torchs_constructor_has_no_hooks_of_its_own() -> None:
    optimizer = make_optimizer(Around, parameters())
    assert optimizer is not None
    assert hook_of(optimizer) is None
