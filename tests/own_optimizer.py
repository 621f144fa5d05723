"""An optimizer of a user's, which does with one parameter what torch's own do not. A job file has this text, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

RATE = 0.05


class Own(torch.optim.Optimizer):
    """how: what it does, see `move`."""

    def __init__(self, given: Any, how: str) -> None:
        super().__init__(given, {"lr": RATE})
        self.how = how
        if how == "keeps tensors by place":
            self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, (number, place))

    def move(self, parameter: nn.Parameter, gradient: Tensor, where: tuple[int, int]) -> None:
        match self.how:
            case "assigns .data":
                parameter.data = parameter.data - RATE * gradient
            case "keeps gradients":
                before = self.state[parameter].get("before", torch.zeros_like(parameter))
                self.state[parameter]["before"] = gradient
                parameter.sub_(2 * gradient - before, alpha=RATE)
            case "changes gradients":
                parameter.sub_(gradient.add_(parameter, alpha=0.5), alpha=RATE)
            case "assigns .data of gradients":
                gradient.data = gradient.data - gradient.data.mean()
                parameter.sub_(gradient, alpha=RATE)
            case "draws":
                parameter.sub_(gradient + 0.01 * torch.randn_like(parameter), alpha=RATE)
            case _:
                slow = self.slow[where[0]][where[1]]
                parameter.copy_(slow.lerp_(parameter - RATE * gradient, 0.5))
