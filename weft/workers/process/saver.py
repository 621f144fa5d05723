"""The saver: a process that writes one snapshot as a checkpoint, and ends.

It reads what the directory has, so workers go on meanwhile; of the cores it takes what they leave.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.machine.checkpoint_files import FOLDER, copy_files, write_checkpoint
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.transport.wire.frames import encode
from weft.workers.snapshots.checkpoint import write_files
from weft.workers.snapshots.place import read_place
from weft.workers.snapshots.saved import Saved

NICENESS = 10


def run_saver(connection: socket.socket, config: Mapping[str, Any]) -> None:
    """Tells the checkpoint's path and size, or why there is none."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    try:
        told = {"path": str(_save(config))}
    except SharedMemoryGone as error:
        told = {"error": str(error)}
    except OSError as error:  # of a write the system says no name
        place = error.filename or Path(config["run_dir"], FOLDER)
        told = {"error": f"{place} cannot be written: {error.strerror or error}"}
    except Exception as error:  # a fault of ours costs a checkpoint, and is told
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}"}
    connection.sendall(encode({"type": "checkpoint", **told}))


def _save(config: Mapping[str, Any]) -> Path:
    directory = Directory(Path(config["directory"]), config["authkey"], config["arenas"])
    iteration, place, tasks = config["snapshot"]

    def write(path: Path) -> Iterable[str]:
        if config["path"] is not None:  # it is a checkpoint, and may be another run's
            return copy_files(Path(config["path"]), path)
        return write_files(Saved(read_place(directory, place, task, iteration) for task in tasks), path)

    return write_checkpoint(
        Path(config["run_dir"]),
        config["step"],
        config["training"],
        write,
        keep=config["keep"],
        best=config["best"],
        counted=config["counted"],
        standing=config["standing"],
        adjusted=config["adjusted"],
    )
