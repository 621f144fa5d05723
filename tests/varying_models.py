"""Jobs whose batches differ in shape from one to the next, as people have them, for tests:
`varying_models.py:workload`, args = {name = "tokens"}.

    tokens    token classification by a small transformer; sentences padded to the longest of their microbatch
    gru       an embedding and two GRUs, the same padding
    routed    words that go to experts, which asks for numbers in every block, the same padding
    images    a convolutional net, batches of one of two sizes each
    few       the transformer, with batches of so many words, which a batch_sampler makes: 1 to 12 sentences each

The held-out sentences are longer than any that is trained on, and the longest of those are not among the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft

VOCABULARY, CLASSES = 29, 3
NUM_TRAIN, NUM_HELD_OUT = 24, 6
BATCH_SIZE = 8
LENGTHS = (3, 4, 5, 6, 9, 14, 21, 32)  # they grow as the data goes on
LONGEST = 75
Batch = dict[str, Any]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 8, padding_idx=0), nn.Embedding(LONGEST, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return self.head(x)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.first = nn.GRU(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.second = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, state = self.first(self.embedding(ids))
        x, _ = self.second(x * ~mask[:, :, None], state[-1:])
        return self.head(x)


class Experts(nn.Module):
    """Each word goes to one of two, so how many there are for each is known from numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(dim=2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(weights.argmax(dim=2) == number)
            if len(rows):
                y[rows, places] = expert(x[rows, places]) * weights[rows, places, number, None]
        return x + y


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.blocks, self.head = nn.ModuleList(Experts() for _ in range(3)), nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * ~mask[:, :, None])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
        )
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(16, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.inlet(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.pool(x).flatten(1))


def _tag(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    output, labels = model(batch["ids"], mask=batch["mask"]), batch["labels"]
    right = (output.argmax(dim=2) == labels)[~batch["mask"]].float().mean()
    return {"loss": cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100), "accuracy": right}


def _classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["image"]), batch["label"])


def pad(sentences: list[torch.Tensor]) -> Batch:
    """To the longest of them. A word's class follows from its number."""
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    mask = ids == 0
    return {"ids": ids, "mask": mask, "labels": (ids % CLASSES).masked_fill(mask, -100), "longest": ids.shape[1]}


def count_words(batch: Batch) -> torch.Tensor:
    return (~batch["mask"]).sum()


def _sentences(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randint(1, VOCABULARY, (length,)) for length in lengths]


class Sizes(torch.utils.data.Dataset[Batch]):
    """Each batch has images of one size; every second one is large. Of no use without the order of a `Grouped`."""

    def __init__(self, count: int, large: int) -> None:
        self._items = [
            {"image": torch.randn(1, extent, extent), "label": torch.tensor(number % CLASSES)}
            for number, extent in ((number, large if number // BATCH_SIZE % 2 else 8) for number in range(count))
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        return self._items[index]


class Grouped(torch.utils.data.Sampler[int]):
    """In a new order each epoch, batches of one size."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        batches = torch.arange(self._count).split(BATCH_SIZE)
        return iter([int(index) for batch in batches for index in batch[torch.randperm(len(batch))]])


class OfWords(torch.utils.data.Sampler[list[int]]):
    """Sentences of a like length, at most so many words with the padding; the batches in a new order each epoch."""

    def __init__(self, lengths: list[int], most: int) -> None:
        self._batches: list[list[int]] = [[]]
        for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
            if self._batches[-1] and (len(self._batches[-1]) + 1) * lengths[number] > most:
                self._batches.append([])
            self._batches[-1].append(number)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        return iter([self._batches[number] for number in torch.randperm(len(self._batches))])


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "tokens": (Tokens, _tag),
    "gru": (Gru, _tag),
    "routed": (Routed, _tag),
    "images": (Images, _classify),
    "few": (Tokens, _tag),
}
NAMES = [*_MODELS]


def workload(name: str) -> weft.Workload:
    make, step = _MODELS[name]
    model = make()
    torch.manual_seed(5)
    train: Any
    held_out: Any
    if name == "images":
        train = torch.utils.data.DataLoader(Sizes(NUM_TRAIN, 14), batch_size=BATCH_SIZE, sampler=Grouped(NUM_TRAIN))
        held_out = Sizes(NUM_HELD_OUT, 8)
        held_out._items = [item | {"image": torch.randn(1, 22, 22)} for item in held_out._items]
        more: dict[str, Any] = {}
    elif name == "few":
        lengths = [LENGTHS[number * len(LENGTHS) // NUM_TRAIN] for number in range(NUM_TRAIN)]
        held_lengths = [5] * (NUM_HELD_OUT - 1) + [LONGEST]
        train, held_out = (
            torch.utils.data.DataLoader(
                _sentences(each),  # type: ignore[arg-type]
                batch_sampler=OfWords(each, most),
                collate_fn=pad,
            )
            for each, most in ((lengths, 48), (held_lengths, LONGEST))
        )
        more = {"weight": count_words}
    else:
        lengths = [LENGTHS[number * len(LENGTHS) // NUM_TRAIN] for number in range(NUM_TRAIN)]
        train = torch.utils.data.DataLoader(_sentences(lengths), batch_size=BATCH_SIZE, collate_fn=pad)  # type: ignore[arg-type]
        held_out = _sentences([5] * (NUM_HELD_OUT - 1) + [LONGEST])
        more = {"collate": pad, "weight": count_words}
    return weft.Workload(
        model,
        train,
        step=step,
        validation=held_out,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        **more,
    )
