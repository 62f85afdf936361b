"""SHA-256 of weight files, held against what was published with them.

What is known of a file: a ``SHA256SUMS`` beside it, in the format of ``sha256sum -c`` (``save_weights`` writes one);
or, of what Hugging Face's client downloaded, the name of the blob its cache links to, or its notes in a local folder.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

SUMS = "SHA256SUMS"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 22


class Known(NamedTuple):
    """What a file's SHA-256 should be, and who says so."""

    sha256: str
    source: str


def sha256(file: epath.Path) -> str:
    """Of the whole file, read in pieces. Raises OSError when it cannot be."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write_sums(directory: epath.Path, files: Sequence[epath.Path]) -> None:
    """Writes ``SHA256SUMS`` of files in the directory."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in files]
    (directory / SUMS).write_text("".join(lines))


def known_checksum(file: epath.Path) -> Known | None:
    """The published checksum of a file, or None where nobody has said."""
    sums = file.parent / SUMS
    if sums.exists():
        for line in sums.read_text().splitlines():
            checksum, _, name = line.partition(" ")
            if name.strip().lstrip("*") == file.name and _SHA256.fullmatch(checksum):
                return Known(checksum, SUMS)
    blob = os.path.basename(os.path.realpath(file))
    if blob != file.name and _SHA256.fullmatch(blob):
        return Known(blob, "the Hugging Face cache")
    notes = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    if notes.exists():  # commit, etag (of large files their SHA-256), time
        etag = [*notes.read_text().splitlines(), "", ""][1]
        if _SHA256.fullmatch(etag):
            return Known(etag, "Hugging Face's download notes")
    return None


def damaged(files: Sequence[epath.Path]) -> list[str]:
    """Names the files that are not what was published, with both checksums; those without one are not read.

    Raises:
      OSError: a file cannot be read.
    """

    def check(file: epath.Path) -> str | None:
        known = known_checksum(file)
        if known is None or (got := sha256(file)) == known.sha256:
            return None
        return f"{file.name} has SHA-256 {got}, expected {known.sha256} ({known.source})"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return [problem for problem in pool.map(check, files) if problem]
