"""Paths given by callers: a file system path, or a `file://` URL. Other schemes are rejected."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from shardwright.errors import StorageError

__all__ = ["folder_of"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/.*)", re.DOTALL)  # pathlib collapses two slashes into one


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of the directory that a caller names; raise `StorageError` for an unsupported URL.

    >>> folder_of("file:///data/run%201")
    '/data/run 1'
    >>> folder_of("s3://bucket/run")
    Traceback (most recent call last):
    shardwright.errors.StorageError: 's3://bucket/run': the scheme s3:// is not supported, only paths and ...
    """
    text = os.fspath(path)
    url = _URL.fullmatch(text) if isinstance(text, str) else None
    if url is None:
        return os.path.abspath(text)
    scheme, rest = url.groups()
    if scheme.lower() != "file":
        raise StorageError(
            f"{text!r}: the scheme {scheme}:// is not supported, only paths and file:// are. Pass a path, or a "
            "Storage of "
            f"your own; a directory that is really called {scheme + ':'!r} is './{text}'"
        )
    host, slash, local = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if host not in ("", "localhost") or not slash:
        raise StorageError(f"{text!r}: a file:// URL must name a path on this host, like file:///data/run")
    return os.path.abspath("/" + unquote(local))
