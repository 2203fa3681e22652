"""The two hashes of the house: sha256 of canonical JSON for contracts, blake3 for file contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

ID_DIGITS = 12


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces and no NaN, so that equal values give equal bytes."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def contract_hash(value: Any) -> str:
    """`sha256:<64 hex>` of the canonical JSON of `value`."""
    return "sha256:" + hashlib.sha256(canonical_json(value).encode()).hexdigest()


def short_id(hash_: str) -> str:
    """The first 12 hex digits of a hash, without its prefix: what records carry."""
    return hash_.rpartition(":")[2][:ID_DIGITS]


def bytes_hash(chunks: Iterable[bytes]) -> str:
    """`blake3:<64 hex>` of the concatenated chunks."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return "blake3:" + hasher.hexdigest()


def file_hash(path: Path) -> str:
    """`blake3:<64 hex>` of a file's contents, memory-mapped."""
    return "blake3:" + blake3().update_mmap(path).hexdigest()
