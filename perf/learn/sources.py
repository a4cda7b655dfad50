"""Text for a language model from packages of Debian 12, which are unpacked and not installed.

| package | what | licence |
| --- | --- | --- |
| anarchism | essays | GPL-2 |
| r-cran-janeaustenr | six novels | MIT |
| dict-gcide | a dictionary of English, from Webster's of 1913 | GPL |
| wordnet-base | glosses of a lexical database | WordNet |
| linux-doc-6.1 | the kernel's documentation | GPL-2 |
| python3.11-doc | Python's documentation | PSF |
| perl-doc | Perl's documentation | GPL-1+ or Artistic |
| git-doc | Git's documentation and release notes | GPL-2 |
| vim-runtime | Vim's help | Vim |
| postgresql-doc-15 | PostgreSQL's manual | PostgreSQL |
| sqlite3-doc | SQLite's documentation | public domain |
| python-django-doc | Django's documentation | BSD-3-Clause |
| libreoffice-help-en-us | LibreOffice's help | MPL-2.0 |
| apache2-doc | the Apache server's manual | Apache-2.0 |

The sources of the standard library of the Python that runs (PSF) are added.
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from perf.convergence.data import r_strings

PIECE = 20_000  # characters of a document that a dictionary is cut into
_DROPPED = re.compile(r"<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
_BREAKS = re.compile(r"</?(p|div|h\d|li|tr|br|pre|table|ul|ol|dl|dt|dd|section)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]+>")

Read = Callable[[bytes], Iterator[str]]


def plain(content: bytes) -> Iterator[str]:
    """Read a file that is one document."""
    yield content.decode(errors="replace")


def page(content: bytes) -> Iterator[str]:
    """Read a page of HTML, without its tags."""
    text = _BREAKS.sub("\n", _DROPPED.sub(" ", content.decode(errors="replace")))
    yield html.unescape(_TAG.sub("", text))


def novels(content: bytes) -> Iterator[str]:
    """Read the texts in the data of an R package."""
    yield from r_strings(content)


def dictionary(content: bytes) -> Iterator[str]:
    """Cut a dictionary between entries, which end at blank lines."""
    yield from pieces(content.decode(errors="replace").split("\n\n"), "\n\n")


def glosses(content: bytes) -> Iterator[str]:
    """Read WordNet's lines: `offset lex_filenum ss_type w_cnt word lex_id ... | gloss`."""
    lines = (line for line in content.decode(errors="replace").splitlines() if not line.startswith(" "))
    found = (line.partition("| ") for line in lines)
    yield from pieces((f"{start.split()[4].replace('_', ' ')}: {gloss.strip()}" for start, _, gloss in found), "\n")


def pieces(entries: Iterator[str] | list[str], between: str) -> Iterator[str]:
    """Join entries to documents of some PIECE characters."""
    piece: list[str] = []
    size = 0
    for entry in entries:
        piece.append(entry)
        size += len(entry)
        if size >= PIECE:
            yield between.join(piece)
            piece, size = [], 0
    if piece:
        yield between.join(piece)


@dataclass(frozen=True)
class Source:
    """Names files of a package, and how documents are read from one of them."""

    package: str
    licence: str
    files: str
    read: Read = plain


SOURCES = (
    Source("anarchism", "GPL-2", "usr/share/doc/anarchism/markdown/*.md*"),
    Source("r-cran-janeaustenr", "MIT", "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", novels),
    Source("dict-gcide", "GPL", "usr/share/dictd/gcide.dict.dz", dictionary),
    Source("wordnet-base", "WordNet", "usr/share/wordnet/data.*", glosses),
    Source("linux-doc-6.1", "GPL-2", "usr/share/doc/linux-doc-6.1/html/_sources/**/*.txt"),
    Source("python3.11-doc", "PSF", "usr/share/doc/python3.11/html/_sources/**/*.txt"),
    Source("perl-doc", "GPL-1+ or Artistic", "usr/share/perl/**/*.pod"),
    Source("git-doc", "GPL-2", "usr/share/doc/git-doc/**/*.txt"),
    Source("vim-runtime", "Vim", "usr/share/vim/vim90/doc/*.txt"),
    Source("postgresql-doc-15", "PostgreSQL", "usr/share/doc/postgresql-doc-15/html/*.html", page),
    Source("sqlite3-doc", "public domain", "usr/share/doc/sqlite3/**/*.html", page),
    Source("python-django-doc", "BSD-3-Clause", "usr/share/doc/python-django-doc/html/**/*.html", page),
    Source("libreoffice-help-en-us", "MPL-2.0", "usr/share/libreoffice/help/en-US/text/**/*.html", page),
    Source("apache2-doc", "Apache-2.0", "usr/share/doc/apache2-doc/manual/en/**/*.html", page),
)
_OTHER_LANGUAGES = "translations"  # of the kernel's documentation


def fetch(package: str, folder: Path) -> str | None:
    """Download a package and unpack it in `folder`, unless it is there. Returns its version, None if apt has none."""
    if not (found := sorted(folder.glob(f"{package}_*.deb"))):
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, capture_output=True, check=False)
        found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        return None
    if not (folder / package).exists():
        partial = folder / f"{package}.part"
        subprocess.run(["dpkg-deb", "-x", found[-1], partial], check=True)
        partial.rename(folder / package)
    return found[-1].name.split("_")[1].replace("%3a", ":")


def documents(source: Source, folder: Path) -> Iterator[str]:
    """Read all documents of a package that was unpacked in `folder`."""
    for path in sorted((folder / source.package).glob(source.files)):
        if path.is_file() and _OTHER_LANGUAGES not in path.parts:
            content = path.read_bytes()
            yield from source.read(gzip.decompress(content) if path.suffix in (".gz", ".dz") else content)


def standard_library() -> Iterator[str]:
    """Read the sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"test", "tests", "site-packages", "dist-packages", "idle_test"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")
