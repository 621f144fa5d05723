"""Models as people have them, small and with random weights, each with a step: none is an `nn.Sequential`, and nothing
in them knows that they will be cut. For tests, and the file of jobs: `any_models.py:workload`, args = {name = "gpt2"}.

Those of transformers are there where it is installed.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, mse_loss
from torch.nn.utils import prune, spectral_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import weft

VOCABULARY, LENGTH, CLASSES = 23, 6, 3
NUM_TRAIN, NUM_HELD_OUT = 20, 5
Batch = dict[str, Any]


class Mlp(nn.Module):
    """Layers by attribute, one of them called twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.again, self.frozen, self.last = (
            nn.Linear(*sizes) for sizes in ((6, 8), (8, 8), (8, 8), (8, 8), (8, 3))
        )
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x).tanh())
        x = self.again(self.second(x).tanh()).tanh()
        x = self.frozen(x) * self.scale
        return self.last(self.again(x))


class Hooked(nn.Module):
    """Layers whose weights are made of others ahead of each call, by hooks, as before there were parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((6, 8), (8, 8), (8, 8)))
        spectral_norm(self.layers[0])
        prune.l1_unstructured(self.layers[1], "weight", 0.5)
        with warnings.catch_warnings(action="ignore"):  # it will be taken away
            nn.utils.weight_norm(self.layers[2])
        self.last = spectral_norm(nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


class Residual(nn.Module):
    """A loose sum around each block, which the blocks write into, and gradient checkpoints outside of them. Blocks are
    left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2)) for _ in range(4)
        )
        self.outlet = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            if self.training and torch.rand(()) < 0.2:
                continue
            x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x))
        return self.outlet(x)


class ResNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += shortcut
        return self.relu(x)


class ResNet18(nn.Module):
    """As torchvision's, an eighth as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = (8, 8, 16, 32, 64)
        for number in range(1, 5):
            stride = 1 if number == 1 else 2
            first = ResNetBlock(widths[number - 1], widths[number], stride)
            self.add_module(f"layer{number}", nn.Sequential(first, ResNetBlock(widths[number], widths[number], 1)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # type: ignore[operator]
        return self.fc(torch.flatten(self.avgpool(x), 1))


class UNet(nn.Module):
    """Its skips jump over two stages and more."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _double(1, 4), _double(4, 8), _double(8, 8)
        self.up2, self.up1, self.out = _double(16, 8), _double(12, 4), nn.Conv2d(4, 1, 1)
        self.pool, self.grow, self.drop = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.drop(self.middle(self.pool(second)))
        x = self.up2(torch.cat([self.grow(x), second], 1))
        return self.out(self.up1(torch.cat([self.grow(x), first], 1)))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


class Lstm(nn.Module):
    """Two that pass a tuple of states, with a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.first = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, (hidden, cell) = self.first(self.embedding(ids))
        x, _ = self.second(x, (hidden[-1:], cell[-1:]))
        return self.head(x)


class Pixels(nn.Module):
    """A parameter of its own in the middle, a module called with keywords, and a dict between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 16, 8))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
        self.join, self.head = _Join(), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(src=x)
        return self.head(self.join({"tokens": x, "mask": None})["mean"])


class Vae(nn.Module):
    """Draws numbers between its modules, of a distribution that checks its arguments, and has two losses of what is far
    apart."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.variance = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.encoder(x).relu()
        mean, variance = self.mean(x), self.variance(x).clamp(-4, 4)
        drawn = torch.distributions.Normal(mean, (0.5 * variance).exp()).rsample()
        return self.decoder(drawn), mean, variance


class Heads(nn.Module):
    """What grows on a network: a head that training alone calls, a counter, normed weights, checkpoints and autocast in
    its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(_NormedBlock() for _ in range(4))
        self.side = nn.Linear(8, CLASSES)
        self.heads = nn.ModuleDict({"kind": nn.Linear(8, CLASSES), "size": nn.Linear(8, 1)})
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for number, block in enumerate(self.trunk):
            x = block(x)
            if number == 1 and self.training:
                self.runs += 1
                found["side"] = self.side(x)
        return found | {name: head(x) for name, head in self.heads.items()}


class _NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = weight_norm(nn.Linear(8, 12)), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.training else self.inner(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype is torch.float32):
            return self.drop(self.narrow(self.widen(x).relu())).to(x.dtype)


class Gated(nn.Module):
    """Blocks that write to what they are given, a sum that is written into what came long before, and a choice in
    booleans and integers that the last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.side, self.gate, self.outlet = nn.Linear(6, 8), nn.Linear(6, 8), _Gate(), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(_Shifted() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.side(x)
        x, (keep, strongest) = self.gate(self.inlet(x))
        for block in self.blocks:
            x = block(x)
        total += x
        return self.outlet(total.where(keep, x[:, :1]) + x.gather(1, strongest))


class Filled(nn.Module):
    """Tensors of zeros that are filled between modules: row by row, through views, by sums of rows of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = torch.arange(len(x), device=x.device) % 2
        rows, halves, pooled = x.new_zeros(4, len(x), 8), x.new_zeros(len(x), 8), x.new_zeros(2, 8)
        total = torch.zeros_like(halves)
        x = self.inlet(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            rows[number] = x
            halves[:, number % 2 :: 2].copy_(x[:, :4])
            total += x
            pooled.index_add_(0, graph, x.to(pooled.dtype))
        rows.view(-1).mul_(0.5)
        return self.outlet(rows.sum(0) + halves + total + pooled[graph])


class Tapped(nn.Module):
    """Hooks that refer to this very model, put there by its first forward, keep what its blocks return. A forward
    stands in the place of another, the step refers to the model by itself, and it cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        self.lock, self.taps, self.has_hooks = threading.Lock(), list[torch.Tensor](), False
        plain = self.outlet.forward
        self.outlet.forward = lambda x: 0.5 * plain(x)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_hooks:
            self.has_hooks = True
            for block in self.blocks:
                block.register_forward_hook(lambda module, given, made: self.taps.append(made))
        with self.lock:
            self.taps.clear()
            x = self.inlet(x)
            for block in self.blocks:
                x = x + block(x)
            return self.outlet(x)


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        scores = self.scores(x)
        return x + scores, (scores > 0, scores.argmax(1, keepdim=True))


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return self.layer(x)


class _Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"mean": gelu(given["tokens"]).mean(1) * self.gain}


class Shared(nn.Module):
    """Layers that are gone through again and again, under checkpoints all but once, and draw each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.middle = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.outlet = nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.groups = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._through(self.groups[0], self.inlet(x))
        return self.outlet(self.norm(self._through(self.groups[1], self.middle(x))))

    def _through(self, group: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + checkpoint(group, x, use_reentrant=False)
        return x + group(x)


def _of_transformers(name: str) -> nn.Module:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
    match name:
        case "gpt2":
            config = transformers.GPT2Config(n_layer=4, n_embd=16, n_head=2, n_positions=16, **sizes)
            return transformers.GPT2LMHeadModel(config)
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**shape, **sizes))
        case "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **sizes, attention_dropout=0.1))
        case "t5":
            dims = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32}
            return transformers.T5ForConditionalGeneration(
                transformers.T5Config(**dims, **sizes, decoder_start_token_id=0)
            )
        case "mixtral":
            experts = {"num_local_experts": 4, "num_key_value_heads": 2}
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape, **sizes, **experts))
        case "whisper":
            layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
            heads = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
            lengths = {"max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1}
            config = transformers.WhisperConfig(**layers, **heads, **lengths, **sizes, dropout=0.1)
            return transformers.WhisperForConditionalGeneration(config)
        case "vit":
            config = transformers.ViTConfig(
                **shape, image_size=16, patch_size=4, num_channels=1, num_labels=CLASSES, hidden_dropout_prob=0.1
            )
            return transformers.ViTForImageClassification(config)
    raise KeyError(name)


# --- data


def _ids(count: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (count, LENGTH))
    mask = torch.ones_like(ids)
    mask[1::2, LENGTH - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _rows(count: int) -> Batch:
    return {"x": torch.randn(count, 6), "y": torch.randint(CLASSES, (count,))}


def _images(count: int, extent: int = 16) -> Batch:
    return {"x": torch.randn(count, 1, extent, extent), "y": torch.randint(CLASSES, (count,))}


def _pictures(count: int) -> Batch:
    return {"x": torch.randn(count, 1, 16, 16), "y": torch.randn(count, 1, 16, 16)}


def _sequences(count: int) -> Batch:
    ids = torch.randint(VOCABULARY, (count, LENGTH + 1))
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def _pixels(count: int) -> Batch:
    images = _images(count)
    return {"pixel_values": images["x"], "labels": images["y"]}


def _sounds(count: int) -> Batch:
    return {"input_features": torch.randn(count, 8, 32), "labels": torch.randint(3, VOCABULARY, (count, LENGTH))}


def _pairs_of_sequences(count: int) -> Batch:
    return {"source": torch.randn(count, 5, 8), "target": torch.randn(count, 4, 8)}


# --- steps


def _classify(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    output = model(batch["x"])
    right = (output.argmax(dim=1) == batch["y"]).to(output.dtype).mean()
    return {"loss": cross_entropy(output, batch["y"]), "accuracy": right}


def _classify_twice(model: nn.Module, batch: Batch) -> torch.Tensor:
    """With other dropout, and as alike as may be."""
    one, other = model(batch["x"]), model(batch["x"])
    loss = cross_entropy(one, batch["y"]) + cross_entropy(other, batch["y"])
    return loss + 0.3 * (one.softmax(1) - other.softmax(1)).square().sum()


def _classify_calmly(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = cross_entropy(model(batch["x"]), batch["y"])
    return loss + 0.1 * sum(made.square().mean() for made in model.taps)  # type: ignore[operator, union-attr]


def _paint_again(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    output, mean, variance = model(batch["x"])
    loss, distance = mse_loss(output, batch["x"]), (variance.exp() + mean**2 - variance - 1).mean()
    return {"loss": loss + 0.1 * distance, "distance": distance}


def _decide(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Changes the batch, as loops do."""
    x, y = batch["x"].mul_(0.5), batch.pop("y")
    batch["x"] = x
    output = model(x.repeat(1, 2)[:, :8])
    losses = {name: cross_entropy(output[name], y) for name in ("kind", "side") if name in output}
    return {
        "loss": losses["kind"] + 0.3 * losses.get("side", 0) + output["size"].square().mean(),
        "main": losses["kind"],
    }


def _paint(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(model(batch["x"]), batch["y"])


def _continue(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _translate(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(model(batch["source"], batch["target"]), batch["target"])


_OWN: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[[int], Batch]]] = {
    "mlp": (Mlp, _classify, _rows),
    "hooked": (Hooked, _classify, _rows),
    "residual": (Residual, _classify, _rows),
    "resnet18": (ResNet18, _classify, partial(_images, extent=40)),  # batch norm wants more than one pixel
    "unet": (UNet, _paint, _pictures),
    "lstm": (Lstm, _continue, _sequences),
    "vae": (Vae, _paint_again, _rows),
    "heads": (Heads, _decide, _rows),
    "gated": (Gated, _classify, _rows),
    "filled": (Filled, _classify, _rows),
    "tapped": (Tapped, _classify_calmly, _rows),
    "shared": (Shared, _classify, _rows),
    "pixels": (Pixels, _classify_twice, _images),
    "transformer": (lambda: nn.Transformer(8, 2, 2, 2, 16, 0.1, batch_first=True), _translate, _pairs_of_sequences),
}
_THEIRS = dict.fromkeys(("gpt2", "bert", "llama", "t5", "mixtral"), _ids) | {"vit": _pixels, "whisper": _sounds}
NAMES = [*_OWN, *(_THEIRS if importlib.util.find_spec("transformers") else ())]


class Items(torch.utils.data.Dataset[Batch]):
    def __init__(self, columns: Batch) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self._columns.items()}


def parts(name: str) -> tuple[nn.Module, Callable[..., Any], Callable[[int], Batch]]:
    """(model, step, what makes so many samples)"""
    if name in _OWN:
        make, step, data = _OWN[name]
        return make(), step, data
    return _of_transformers(name), _own_loss, _THEIRS[name]


def workload(name: str, double: bool = False) -> weft.Workload:
    model, step, data = parts(name)
    torch.manual_seed(5)
    train, held_out = data(NUM_TRAIN), data(NUM_HELD_OUT)
    if double:
        model = model.double()
        train, held_out = (
            {key: value.double() if value.is_floating_point() else value for key, value in columns.items()}
            for columns in (train, held_out)
        )
    return weft.Workload(
        model,
        Items(train),
        step=(lambda _, batch: step(model, batch)) if name == "tapped" else step,
        validation=Items(held_out),
        optimizer=_momentum if double else _adam,
    )


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam would make the rounding of gradients that are nothing else as large as the rest."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
