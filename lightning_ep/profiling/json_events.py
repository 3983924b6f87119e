"""Chrome trace files read event by event, so that a trace of any size needs the memory of one buffer."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_BUFFER = 1 << 23  # characters read at once
_MARGIN = 1 << 16  # refill before the rest of the buffer gets this short; a longer event only costs a retry
_MAX_EVENT = 1 << 26  # a single value above this is not a trace
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*,\s*")
# Numbers with a fraction stay text: microseconds since 1970 with three decimals do not fit a float.
_DECODER = json.JSONDecoder(parse_float=str, strict=False)


class ChromeTrace:
    """A Chrome trace (plain or gzip): either a list of events, or an object with a list under `traceEvents`.

    Iterating yields one dict an event. `metadata` holds the object's other entries, complete once iteration ended.

    Raises (while iterating):
        ValueError: no JSON, another structure, or truncated; file, event number and byte position are named.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.count = 0
        self._buffer, self._at = "", 0
        self._bytes_before = 0  # of the (decompressed) file, before the buffer
        self._ended = False
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as raw:
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            self._file: BinaryIO = gzip.GzipFile(fileobj=raw) if compressed else raw
            opening = self._next_character()
            if opening == "[":
                yield from self._events()
            elif opening == "{":
                yield from self._object()
            else:
                raise self._error(f"starts with {opening!r} instead of a JSON object or list")

    def _object(self) -> Iterator[dict[str, Any]]:
        found = False
        while True:
            key = self._value()
            if not isinstance(key, str):
                raise self._error(f"expected a key, found {key!r:.40}")
            self._expect(":")
            if key == "traceEvents":
                self._expect("[")
                found = True
                yield from self._events()
            else:
                self.metadata[key] = self._value()
            if self._expect(",", "}") == "}":
                break
        if not found:
            raise ValueError(f"{self.path}: no traceEvents in it; this is not a Chrome trace")

    def _events(self) -> Iterator[dict[str, Any]]:
        """The events of a list whose opening bracket was read."""
        if self._peek_character() == "]":
            self._expect("]")
            return
        decode, separator = _DECODER.raw_decode, _SEPARATOR.match
        while True:
            event = self._value()
            # The fast way: as long as events follow each other in the buffer, nothing but decoding is done.
            buffer, at, enough = self._buffer, self._at, len(self._buffer) - _MARGIN
            while type(event) is dict:
                yield event
                self.count += 1
                comma = separator(buffer, at)
                if comma is None or comma.end() > enough:
                    break
                try:
                    event, at = decode(buffer, comma.end())
                except (ValueError, RecursionError):
                    break  # the careful way decodes it again, and knows what to say
            else:
                self._at = at
                raise self._error(f"expected an event, found {event!r:.40}")
            self._at = at
            if self._expect(",", "]") == "]":
                return

    def _value(self) -> Any:
        """The next JSON value."""
        if len(self._buffer) - self._at < _MARGIN and not self._ended:
            self._refill()
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()
            try:
                value, self._at = _DECODER.raw_decode(self._buffer, self._at)
                return value
            except (ValueError, RecursionError) as error:
                # Either the value goes on beyond the buffer, or it is malformed: more text tells.
                if self._ended or len(self._buffer) - self._at > _MAX_EVENT:
                    raise self._error(getattr(error, "msg", str(error)), getattr(error, "pos", self._at)) from error
                self._refill()

    def _peek_character(self) -> str:
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if self._ended:
                raise self._error("the file ends here")
            self._refill()

    def _next_character(self) -> str:
        character = self._peek_character()
        self._at += 1
        return character

    def _expect(self, *characters: str) -> str:
        found = self._peek_character()
        if found not in characters:
            raise self._error(f"expected {' or '.join(map(repr, characters))}, found {found!r}")
        self._at += 1
        return found

    def _refill(self) -> None:
        """Drop what was read and append at least as much as is left, so that retries stay linear in all."""
        self._bytes_before += len(self._buffer[: self._at].encode("utf-8", "surrogateescape"))
        rest = self._buffer[self._at :]
        try:
            data = self._file.read(max(_BUFFER, len(rest)))
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(
                f"{self.path}: event {self.count}: the compressed data cannot be read on ({error}): "
                "the file is truncated or damaged"
            ) from error
        self._ended = not data
        self._buffer, self._at = rest + self._decode(data, final=not data), 0

    def _error(self, what: str, at: int | None = None) -> ValueError:
        at = self._at if at is None else at
        byte = self._bytes_before + len(self._buffer[:at].encode("utf-8", "surrogateescape"))
        text = self._buffer.rstrip()
        truncated = self._ended and (at >= len(text) or not text.endswith(("}", "]")))
        hint = "the file is truncated: was the process killed while it wrote?" if truncated else "malformed JSON"
        return ValueError(f"{self.path}: event {self.count}, byte {byte}: {what} ({hint})")
