"""Models by chance, for tests: a number is a model with a forward of its own, the same on any day.
`chance_models.py:workload`, args = {number = 3}.

A forward is a list of statements over registers, each a tensor of (samples, WORDS, WIDTH): calls of modules of many
kinds, once or again, in loops, under checkpoints, left out at random; and lines between, which write in place, mix,
slice, detach, or read parameters. Modules nest, pass on tuples and dicts, and keep losses that the step reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import weft

WIDTH, WORDS, CLASSES, VOCABULARY = 6, 4, 3, 11
NUM_TRAIN, NUM_HELD_OUT = 20, 6
Batch = dict[str, torch.Tensor]
Tensor = torch.Tensor


# --- modules


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor, weights: bool = True) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, x, x, need_weights=weights)


class Along(nn.Module):
    """A convolution over the words."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Shift(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return x


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Counted(nn.Module):
    """Computes with what the forward before has left in its buffers."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.layer(x) - self.mean.detach()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn_like(x) if self.training else x


class _Signed(torch.autograd.Function):
    """Its backward writes over what it has kept, as nobody asks for it twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        made = linear(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.inside = (made.abs() < 1).to(made.dtype)
        return made.sign() * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = ctx.inside.mul_(gradient)
        return gradient @ weight, gradient.reshape(-1, WIDTH).T @ x.reshape(-1, WIDTH)


class Signs(nn.Module):
    """With a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Signed.apply(x, self.layer.weight) + self.layer.bias


class Both(nn.Module):
    """Of two tensors a dict with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"made": self.one(x) + self.other(y), "parts": [x.mean(1, keepdim=True), y > 0]}


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last.tanh()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.route(x).softmax(-1)
        best, made = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            made[chosen] = expert(x[chosen]) * scores[chosen][:, number : number + 1]
        return made


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def _square(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


KINDS: tuple[Callable[[], nn.Module], ...] = (
    *(_square,) * 4,
    partial(_square, bias=False),
    partial(nn.LayerNorm, WIDTH),
    partial(nn.LayerNorm, WIDTH, elementwise_affine=False),
    partial(nn.Dropout, 0.3),
    partial(nn.Dropout, 0.3, inplace=True),
    nn.Tanh,
    nn.GELU,
    partial(nn.ReLU, inplace=True),
    nn.PReLU,
    nn.Identity,
    partial(Attention, 0.0),
    partial(Attention, 0.2),
    partial(nn.GRU, WIDTH, WIDTH, batch_first=True),
    partial(nn.LSTM, WIDTH, WIDTH, batch_first=True),
    partial(Along, 1),
    partial(Along, 2),
    Shift,
    Gain,
    Normed,
    Counted,
    Noisy,
    Signs,
    Both,
    Keeping,
    Experts,
    _frozen,
    lambda: weight_norm(_square()),
    lambda: spectral_norm(_square()),
    lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)),
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), _square(), nn.ReLU(inplace=True)),
    partial(nn.TransformerEncoderLayer, WIDTH, 2, 8, 0.1, batch_first=True),
    partial(nn.TransformerEncoderLayer, WIDTH, 2, 8, 0.1, batch_first=True, norm_first=True),
    partial(nn.Embedding, VOCABULARY, WIDTH),
    partial(nn.Embedding, VOCABULARY, WIDTH, padding_idx=0),
    partial(nn.Bilinear, WIDTH, WIDTH, WIDTH),
)


# --- statements


@dataclass(frozen=True, slots=True)
class Statement:
    """first, second: registers that it reads. part: number of the module that it calls. variant: of 0 to 1."""

    what: str
    first: int
    second: int
    part: int
    variant: float


class Program(nn.Module):
    """Of one tensor or two another one; as a tensor, in a tuple or in a dict."""

    def __init__(self, chance: random.Random, length: int, depth: int) -> None:
        """depth: how many programs may lie in each other."""
        super().__init__()
        self.parts = nn.ModuleList()
        self.gain = nn.Parameter(torch.ones(WIDTH)) if chance.random() < 0.3 else None
        self.returns = chance.choice(("tensor", "tensor", "tensor", "tensor", "tuple", "dict"))
        self.losses: list[Tensor] = []
        self.statements: list[Statement] = []
        registers = 2
        for _ in range(length):
            what = chance.choice(CALLS * 3 + ("call", "again", "again", "nested", *LINES, "write", "loss"))
            if what in CALLS or (what == "nested" and not depth):
                self.parts.append(chance.choice(KINDS)())
            elif what == "nested":
                self.parts.append(Program(chance, chance.randint(2, 4), depth - 1))
            elif what in ("again", "tied") and not len(self.parts):
                continue
            part = chance.randrange(len(self.parts)) if what in ("again", "tied") else len(self.parts) - 1
            what = "call" if what in ("again", "nested") else what
            read = chance.randrange(max(0, registers - 3), registers), chance.randrange(registers)
            self.statements.append(Statement(what, *read, part, chance.random()))
            registers += what not in ("write", "loss")

    def forward(self, x: Tensor, ids: Tensor, y: Tensor | None = None) -> Any:
        self.losses.clear()
        registers = [x, x if y is None else y]
        for each in self.statements:
            p, q = registers[each.first], registers[each.second]
            if each.what == "write":
                if each.variant < 0.5:
                    registers[each.first] = p.clone()
                registers[each.first] += q * 0.5
            elif each.what == "loss":
                self.losses.append(p.square().mean() if each.variant < 0.5 else (p - 2 * q).abs().mean())
            elif each.what in LINES:
                registers.append(LINES[each.what](self, each, p, q))
            else:
                registers.append(self._called(each, p, q, ids))
        made = registers[-1]
        if self.returns == "tuple":
            return made, registers[-2]
        return {"made": made, "parts": [registers[0], registers[-2] > 0]} if self.returns == "dict" else made

    def _called(self, each: Statement, p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
        call = partial(self._call, each, q=q, ids=ids)
        match each.what:
            case "checkpoint":
                return checkpoint(call, p, use_reentrant=False)
            case "maybe":
                return p if self.training and torch.rand(()) < 0.4 else p + call(p)
            case "loop":
                return call(call(p) * 0.5) * 0.5
            case "unseen":
                with torch.no_grad():
                    made = call(p.clone())
                return made.clone()  # a view that was made so nobody may write to
        return call(p)

    def _call(self, each: Statement, p: Tensor, *, q: Tensor, ids: Tensor) -> Tensor:
        part, is_variant = self.parts[each.part], each.variant < 0.5
        match part:
            case Program():
                return one_of(part(p, ids, q) if is_variant else part(p, ids=ids), each.variant)
            case nn.Embedding():
                return p + part(ids)
            case nn.Bilinear():
                return part(p, q)
            case Both():
                return one_of(part(p, q) if is_variant else part(p, y=q), each.variant)
            case Attention():
                return one_of(part(p, weights=is_variant), each.variant)
        if isinstance(part, Shift) or getattr(part, "inplace", False):
            return part(p.clone() if is_variant else p * 1)
        return one_of(part(p), each.variant)


CALLS = ("call", "checkpoint", "maybe", "loop", "unseen")


def _tied(program: Program, each: Statement, p: Tensor, q: Tensor) -> Tensor:
    weight = getattr(program.parts[each.part], "weight", None)
    return p + q if weight is None or tuple(weight.shape) != (WIDTH, WIDTH) else linear(p, weight)


def _joined(program: Program, each: Statement, p: Tensor, q: Tensor) -> Tensor:
    one, other = torch.cat([p, q], -1).chunk(2, -1)
    return one + other if each.variant < 0.5 else other


def _filled(program: Program, each: Statement, p: Tensor, q: Tensor) -> Tensor:
    made = p.new_zeros(p.shape)
    made[:, ::2] = p[:, ::2]
    made[:, 1] += q[:, 0]
    return made


LINES: Mapping[str, Callable[[Program, Statement, Tensor, Tensor], Tensor]] = {
    "add": lambda program, each, p, q: p + q,
    "multiply": lambda program, each, p, q: p * q.sigmoid(),
    "join": _joined,
    "choose": lambda program, each, p, q: torch.where(q > 0, p, q),
    "detach": lambda program, each, p, q: p.detach() + q,
    "mean": lambda program, each, p, q: p.mean(1, keepdim=True).expand_as(p) + q,
    "gain": lambda program, each, p, q: p * (2 if program.gain is None else program.gain),
    "view": lambda program, each, p, q: p.transpose(1, 2).reshape(p.shape) if each.variant < 0.5 else p.flip(1),
    "fill": _filled,
    "flag": lambda program, each, p, q: p if program.training else q,
    "number": lambda program, each, p, q: p / (1 + p.shape[1]) + torch.arange(WORDS, device=p.device)[:, None] * 0.01,
    "tied": _tied,
}


def one_of(made: Any, variant: float) -> Tensor:
    """A tensor of what a module returns, in which the rest of it may be."""
    if isinstance(made, dict):
        first, kept = made["parts"]
        return made["made"] + first * kept.to(first.dtype)
    if torch.is_tensor(made):
        return made
    first, other = made
    if variant < 0.5 or other is None:
        return first
    if isinstance(other, tuple):  # states of an LSTM
        other = other[0]
    if other.shape == first.shape:
        return first + 0.1 * other
    if other.dim() == 3 and other.shape[-1] == WORDS:  # weights of an attention
        return first + other @ first
    return first + other[-1][:, None]


# --- the job


class Model(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        chance = random.Random(number)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.body = Program(chance, chance.randint(3, 12), 2)
        is_tied = chance.random() < 0.2
        self.head = nn.Linear(WIDTH, VOCABULARY if is_tied else CLASSES, bias=chance.random() < 0.8)
        if is_tied:
            self.head.weight = self.words.weight
        self.tells_losses = chance.random() < 0.3

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        logits = self.head(one_of(self.body(x + self.words(ids), ids), 0.7).mean(1))
        return {"logits": logits, "loss": self.loss()} if self.tells_losses else logits

    def loss(self) -> Tensor | None:
        found = [each for part in self.modules() if isinstance(part, Program) for each in part.losses]
        return torch.stack(found).sum() if found else None


class Items(torch.utils.data.Dataset[Batch]):
    def __init__(self, count: int) -> None:
        self._x, self._ids = torch.randn(count, WORDS, WIDTH).double(), torch.randint(VOCABULARY, (count, WORDS))
        self._y = torch.randint(CLASSES, (count,))

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self._x[index], "ids": self._ids[index], "y": self._y[index]}


def step(model: Model, batch: Batch) -> dict[str, Tensor]:
    made = model(batch["x"], batch["ids"])
    logits, own = (made["logits"], made["loss"]) if isinstance(made, dict) else (made, model.loss())
    loss = cross_entropy(logits, batch["y"])
    right = (logits.argmax(1) == batch["y"]).double().mean()
    return {"loss": loss if own is None else loss + 0.1 * own, "right": right}


def workload(number: int) -> weft.Workload:
    torch.manual_seed(number)
    chance = random.Random(-number)
    model = Model(number).double()
    momentum = chance.choice((0.0, 0.9))

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Of SGD: Adam would make the rounding of gradients that are nothing else as large as the rest."""
        all_of_them = list(parameters)
        groups = [
            {"params": [each for each in all_of_them if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in all_of_them if each.dim() < 2]},
        ]
        return torch.optim.SGD(groups, lr=0.03, momentum=momentum, nesterov=momentum > 0)

    train, held_out = Items(NUM_TRAIN), Items(NUM_HELD_OUT)
    validation = held_out if chance.random() < 0.7 else None
    return weft.Workload(model, train, step=step, validation=validation, optimizer=optimizer)
