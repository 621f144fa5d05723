"""Checkpoint: what training had come to, as files that plain PyTorch reads.

    model*.safetensors       the model's state dict, by the user's own names
    optimizer*.safetensors   "ENTRY/PARAMETER": what the optimizer keeps of each element
    buffers.safetensors      "REPLICA/NAME": buffers that no state dict has, and those of other replicas than the first
    training.pt              the rest, plain data: of the optimizer by parameter, its groups' options, the scheduler;
                             by replica, what modules remember in attributes

A file has SHARD_BYTES at most, as far as one tensor has; files after the first are numbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.machine.checkpoint_files import Checkpoint, CheckpointError
from weft.transport.memory.arena import dtype_name
from weft.workers.snapshots.attributes import check_kept, check_modes
from weft.workers.snapshots.held import VALUES
from weft.workers.snapshots.plain import decoded, encoded
from weft.workers.snapshots.saved import Saved, in_memory_order
from weft.workers.snapshots.tensor_file import as_saved, write_tensors
from weft.workload.workload import WorkloadError

SHARD_BYTES = 2 << 30
MODEL, OPTIMIZER, BUFFERS = "model", "optimizer", "buffers"
PLAIN = "training.pt"
SUFFIX = ".safetensors"
_ALWAYS = (f"{MODEL}{SUFFIX}", f"{OPTIMIZER}{SUFFIX}", f"{BUFFERS}{SUFFIX}", PLAIN)  # there with nothing in them, too


def write_files(saved: Saved, directory: Path) -> list[str]:
    """Their names. saved: of snapshots. Errors: OSError."""
    shapes = {name.first: torch.empty_strided(name.shape, name.strides, device="meta") for name in saved.names}

    def model() -> Iterator[tuple[str, Tensor]]:
        for name in saved.names:
            value = saved.values(name.first, shapes[name.first])
            if value is None:
                value = saved.fixed[name.first] if name.first in saved.fixed else saved.buffers(0)[name.first]
            yield name.name, value

    def optimizer() -> Iterator[tuple[str, Tensor]]:
        for first, like in shapes.items():
            for entry, flat in saved.elements(first, like).items():
                yield f"{entry}/{first}", flat.as_strided(like.shape, like.stride())

    shown = {name.first for name in saved.names}
    buffers = {
        f"{replica}/{name}": value
        for replica, own in saved.all_buffers().items()
        for name, value in own.items()
        if replica or name not in shown
    }
    written = [PLAIN]
    for stem, tensors in ((MODEL, model()), (OPTIMIZER, optimizer()), (BUFFERS, iter(buffers.items()))):
        written += _write_shards(directory, stem, tensors)
    (directory / PLAIN).write_bytes(encoded(saved.plain(), numbers=False))
    return written


def _write_shards(directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """A tensor is put together when its file's turn comes. The files' names."""
    shard: dict[str, Tensor] = {}
    count = num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > SHARD_BYTES:
            write_tensors(as_saved(shard), directory / _file(stem, count))
            shard, num_bytes, count = {}, 0, count + 1
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard or not count:
        write_tensors(as_saved(shard), directory / _file(stem, count))
        count += 1
    return [_file(stem, number) for number in range(count)]


def _file(stem: str, number: int) -> str:
    return f"{stem}{SUFFIX}" if number == 0 else f"{stem}-{number + 1:05d}{SUFFIX}"


class OpenCheckpoint(Saved):
    """One on the disk, whose digests have been checked; each tensor is read when it is asked for. Errors:
    CheckpointError for files that are not what they should be, and those of Saved."""

    place = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(())
        self._path = checkpoint.path
        if lacking := [name for name in _ALWAYS if name not in checkpoint.files]:
            raise CheckpointError(f"{self._path} is no whole checkpoint (its manifest has no {lacking[0]})")
        self._files: dict[str, dict[str, Any]] = {}  # by stem and name, the open file that has the tensor
        for name in sorted(checkpoint.files):
            stem = name.removesuffix(SUFFIX).partition("-")[0]
            if name.endswith(SUFFIX):
                file = self._open(name)
                self._files.setdefault(stem, {}).update(dict.fromkeys(file.keys(), file))
        try:
            plain = decoded((checkpoint.path / PLAIN).read_bytes())
            self._states, self._options = _by_name(plain, "states"), _by_name(plain, "options")
            self.scheduler = plain["scheduler"]
            if self.scheduler is not None and not isinstance(self.scheduler, dict):
                raise ValueError("scheduler is no mapping")
            # Older releases have saved none of these.
            kept, self.kinds = dict(plain.get("attributes", {})), dict(plain.get("kinds", {}))
            self._attributes = {replica: check_kept(own) for replica, own in kept.items()}
            self._modes = {replica: check_modes(own) for replica, own in dict(plain.get("modes", {})).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{checkpoint.path / PLAIN} is no file of a checkpoint ({error!s:.200})") from error
        self._entries: dict[str, list[str]] = {}
        for key in self._files.get(OPTIMIZER, {}):
            entry, _, parameter = key.partition("/")
            self._entries.setdefault(parameter, []).append(entry)

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._path / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path / name} is no safetensors file ({error!s:.200})") from error

    def check_model(self, parameters: Mapping[str, Tensor]) -> None:
        """Of buffers, and of what nobody trains, a model may have others by the time that it is saved. Errors:
        WorkloadError where the one that was saved had other parameters, or some in another dtype."""
        trained = {name for name, each in parameters.items() if each.requires_grad}
        lacking, unknown = sorted(trained - self._files[MODEL].keys()), sorted(self._options.keys() - parameters.keys())
        if lacking or unknown:
            sides = ((lacking, "that it does not have"), (unknown, "that this one does not have"))
            told = " and ".join(f"{len(names)} parameters {what} ({names[0]!r:.80})" for names, what in sides if names)
            raise WorkloadError(
                f"Workload.model is another than that of {self._path}: there are {told}; build the model as it was then"
            )
        for name in sorted(trained):  # a copy that converts would leave what the optimizer keeps of it as it was
            now, was = parameters[name].dtype, _dtype_of(self._files[MODEL][name], name)
            if now != was:
                raise WorkloadError(
                    f"Workload.model is another than that of {self._path}: {name!r:.80} is {dtype_name(now)} and was "
                    f"{dtype_name(was)} when it was saved; build the model in the dtype that it had, or begin a new "
                    "job with the weights (Workload.start)"
                )

    def entries(self, parameter: str) -> list[str]:
        return [*([VALUES] if parameter in self._files[MODEL] else []), *self._entries.get(parameter, [])]

    def buffers(self, replica: int) -> Mapping[str, Tensor]:
        """The first one's where the checkpoint has none of the replica's."""
        others = self._files.get(BUFFERS, {})
        begin = f"{replica}/"
        own = {key.removeprefix(begin): file.get_tensor(key) for key, file in others.items() if key.startswith(begin)}
        return _Buffers(self._files[MODEL], own)

    def flat(self, parameter: str, entry: str, like: Tensor) -> Tensor:
        stem, key = (MODEL, parameter) if entry == VALUES else (OPTIMIZER, f"{entry}/{parameter}")
        return in_memory_order(parameter, self._files[stem][key].get_tensor(key), like)


def _by_name(plain: Any, what: str) -> dict[str, dict[str, Any]]:
    """Errors: ValueError for other than mappings by a parameter's name, KeyError."""
    found = plain[what]
    if not isinstance(found, dict) or not all(type(n) is str and isinstance(own, dict) for n, own in found.items()):
        raise ValueError(f"{what} are no mappings by parameter")
    return found


def _dtype_of(file: Any, name: str) -> torch.dtype:
    """Of a tensor in an open file; nothing is read but of one without dimensions, which has no slice."""
    tensor = file.get_slice(name)
    dtype: torch.dtype = (tensor[:0] if tensor.get_shape() else file.get_tensor(name)).dtype
    return dtype


class _Buffers(Mapping[str, Tensor]):
    """Those of a replica before those of the model's state dict."""

    def __init__(self, model: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        self._model = model
        self._own = own

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._own[name] if name in self._own else self._model[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._model), **dict.fromkeys(self._own)})

    def __len__(self) -> int:
        return len(set(self._model) | set(self._own))
