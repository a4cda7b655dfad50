"""The file that training needs: LZMA of a line of JSON, which says what the tokens are, and the tokens, 2 bytes each.

Whole documents are held out. Those of training come first.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perf.convergence.data import DataMissing
from perf.convergence.tasks import windows

FILE = "tokens.xz"
MOST_BYTES = 52_000_000  # of the file: 64 MiB travel to a GPU, the working tree included
# Two bytes a token: what comes next depends on whether it is the first or the second of them.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 2, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Tokens:
    """Holds the two texts. `about` has the vocabulary's size, a digest of all tokens, and where they are from."""

    train: np.ndarray
    held_out: np.ndarray
    about: Mapping[str, Any]

    def windows(self, length: int) -> Tensor:
        """Cut the text to train on: int32 [n, length + 1]."""
        return torch.from_numpy(windows(self.train, length).astype(np.int32))

    def held_out_windows(self, length: int, most: int) -> Tensor:
        """Cut at most so many windows, spread over all that is held out."""
        every = windows(self.held_out, length)
        picked = np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int)
        return torch.from_numpy(every[picked].astype(np.int32))


def write_tokens(path: Path, train: np.ndarray, held_out: np.ndarray, about: Mapping[str, Any]) -> None:
    """Write the whole file, or leave what was there before."""
    content = np.concatenate([train, held_out]).astype("<u2").tobytes()
    counts = {"train": len(train), "held_out": len(held_out), "digest": hashlib.sha256(content).hexdigest()[:16]}
    line = json.dumps({**about, **counts}).encode() + b"\n"
    partial = path.with_suffix(".part")
    partial.write_bytes(lzma.compress(line + content, filters=FILTERS))
    partial.replace(path)


def read_tokens(path: Path) -> Tokens:
    if not path.exists():
        raise DataMissing(f"no tokens in {str(path)!r}. Get them with:  python -m perf.learn --prepare")
    line, _, content = lzma.decompress(path.read_bytes()).partition(b"\n")
    about = json.loads(line)
    tokens = np.frombuffer(content, "<u2")
    return Tokens(tokens[: about["train"]], tokens[about["train"] :], about)


def write_rehearsal(path: Path) -> None:
    """Write the topics of Python's `help()`, a token a byte; every tenth is held out."""
    texts = [np.frombuffer(topics[name].encode() + b"\n\n", np.uint8) for name in sorted(topics)]
    held_out = np.concatenate(texts[9::10])
    train = np.concatenate([text for i, text in enumerate(texts) if i % 10 != 9])
    write_tokens(path, train, held_out, {"vocabulary": 256, "from": "the topics of Python's help()"})
