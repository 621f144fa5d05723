"""Takes memory of GPU 0 until so much is free, and keeps it until its input ends: a large card is then a small one.

Config: free_bytes. Prints {"free_bytes": what is free then} as JSON.
"""

from __future__ import annotations

import json
import sys

import torch

PIECE_BYTES = 1 << 30


def main() -> None:
    config = json.loads(sys.argv[1])
    taken = []
    while (surplus := torch.cuda.mem_get_info()[0] - config["free_bytes"]) > 0:
        taken.append(torch.empty(min(PIECE_BYTES, surplus), dtype=torch.uint8, device="cuda"))
    print(json.dumps({"free_bytes": torch.cuda.mem_get_info()[0]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
