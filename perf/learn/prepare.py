"""Text becomes tokens: documents without what was there before, a tokenizer trained on them, a file of all tokens."""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onebit.cli.arguments import CommandError
from onebit.cli.progress import Progress
from perf.convergence.data import DataMissing
from perf.learn.plan import Setting
from perf.learn.sources import SOURCES, documents, fetch, standard_library
from perf.learn.tokens import FILE, MOST_BYTES, write_tokens
from perf.tables import markdown

END = "<|endoftext|>"  # between documents
SHORTEST = 500  # characters of a document
MENU = 10  # a paragraph that more than one document in so many has is of a menu or a footer
REPEATED = 80  # characters from which on a paragraph is kept once only
HELD_OUT = 64  # one document in so many
_PARAGRAPHS = re.compile(r"\n\s*\n")


@dataclass
class Origin:
    """Holds what one package has given."""

    package: str
    version: str
    licence: str
    texts: list[str] = field(default_factory=list)

    @property
    def about(self) -> dict[str, Any]:
        own = {"package": self.package, "version": self.version, "licence": self.licence}
        return {**own, "documents": len(self.texts), "characters": sum(map(len, self.texts))}


class Cleaner:
    """Remembers every long paragraph, so that a licence or a table is not learned a thousand times."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def clean(self, texts: Iterable[str]) -> Iterator[str]:
        """Leave of each document of a package what is new in it, and drop those of which little is left."""
        documents = [_PARAGRAPHS.split(_stripped(text)) for text in texts]
        found_in = Counter(part for parts in documents for part in set(parts))
        for parts in documents:
            of_menus = {part for part in parts if found_in[part] > max(MENU, len(documents) // MENU)}
            kept = "\n\n".join(part for part in parts if part not in of_menus and self._is_new(part))
            if len(kept) >= SHORTEST:
                yield kept

    def _is_new(self, paragraph: str) -> bool:
        if len(paragraph) < REPEATED:
            return True
        key = _digest(" ".join(paragraph.split()))
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _stripped(text: str) -> str:
    """Remove what is blank at the ends of lines and of the text."""
    return "\n".join(line.rstrip() for line in text.replace("\0", "").splitlines()).strip("\n")


def is_held_out(text: str) -> bool:
    """Decide by the text alone: the same documents whatever else there is."""
    return int.from_bytes(_digest(text), "big") % HELD_OUT == 0


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()


def prepare(work: Path, setting: Setting) -> str:
    """Make the file of tokens in `work`; packages are kept there, too. Returns what it is made of."""
    start, progress = time.monotonic(), Progress()
    origins = list(gather(work / "packages", progress))
    progress.show("training the tokenizer")
    texts = [text for origin in origins for text in origin.texts]
    train, held_out = tokenize(texts, setting.shape.vocabulary)
    progress.show("compressing tokens")
    path, about = work / FILE, {"vocabulary": setting.shape.vocabulary, "from": [origin.about for origin in origins]}
    write_tokens(path, train, held_out, about)
    progress.clear()
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CommandError(f"{path} has {size:,} bytes, more than the {MOST_BYTES:,} that travel: take a package out")
    return (
        f"{table(origins)}\n\n{len(train) / 1e6:.2f} million tokens to train on, {len(held_out) / 1e6:.2f} million "
        f"held out: {setting.steps:,} steps see each {setting.tokens / len(train):.2f} times. {size / 1e6:.1f} MB, "
        f"{time.monotonic() - start:.0f} s: {path}"
    )


def table(origins: Sequence[Origin]) -> str:
    rows = [[str(value) for value in origin.about.values()] for origin in origins]
    return markdown(["package", "version", "licence", "documents", "characters"], rows, numbers=(3, 4))


def gather(folder: Path, progress: Progress) -> Iterator[Origin]:
    """Read every package that apt has, in this order: a paragraph stays where it comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    cleaner = Cleaner()
    for source in SOURCES:
        progress.show(f"reading {source.package}")
        if version := fetch(source.package, folder):
            yield Origin(source.package, version, source.licence, list(cleaner.clean(documents(source, folder))))
        else:
            progress.show(f"{source.package} is left out: apt-get download does not find it here")
    yield Origin("Python's standard library", platform.python_version(), "PSF", list(cleaner.clean(standard_library())))


def tokenize(texts: Sequence[str], vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens to train on and those held out, uint16: byte pairs, which are found in the former alone."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ModuleNotFoundError as error:
        raise DataMissing("a vocabulary is trained with tokenizers. Get it with:  pip install tokenizers") from error
    train, held_out = [t for t in texts if not is_held_out(t)], [t for t in texts if is_held_out(t)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(train, vocabulary, show_progress=False, special_tokens=[END])
    if tokenizer.get_vocab_size() != vocabulary:
        raise CommandError(f"the text gives a vocabulary of {tokenizer.get_vocab_size()}, not {vocabulary}: add text")

    def encoded(documents: Sequence[str]) -> np.ndarray:
        end = tokenizer.token_to_id(END)
        parts = [np.array([*tokenizer.encode(text).ids, end], np.uint16) for text in documents]
        return np.concatenate(parts)

    return encoded(train), encoded(held_out)
