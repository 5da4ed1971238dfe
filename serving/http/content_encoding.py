"""Bodies that clients have compressed, unpacked piece by piece: nobody's zeros fill the memory."""

import zlib
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from engine.errors import InvalidRequestError

ACCEPTED: Final = "gzip, deflate"
PIECE_BYTES: Final = 262_144
# What follows a member is copied at its end: short steps keep many tiny members cheap.
STEP_BYTES: Final = 4096
_GZIP_BITS: Final = 31
_ZLIB_BITS: Final = 15


class Unpacker:
    """One compressed body, as its bytes arrive: a stream of deflate, or members of gzip in a row.

    RFC 1952, 2.2, allows the members; programs that append to a file or work in parallel write
    them. Nothing may follow the last.
    """

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: zlib._Decompress | None = None
        self._rest = b""

    def piece(self, data: bytes) -> bytes:
        """Up to `PIECE_BYTES` of what `data` adds; nothing when more must arrive first.

        Raises InvalidRequestError for what is no such stream, and for bytes behind its end.
        """
        data = self._rest + data
        at = 0
        unpacked = bytearray()
        # A length of 0 would mean no bound, so the loop ends before.
        while len(unpacked) < PIECE_BYTES:
            step = data[at : at + STEP_BYTES]
            stream = self._stream_for(step)
            if stream is None:
                break
            try:
                out = stream.decompress(step, PIECE_BYTES - len(unpacked))
            except zlib.error as error:
                raise InvalidRequestError(f"the {self._coding} body is damaged: {error}") from error
            unpacked += out
            at += len(step) - len(stream.unconsumed_tail or stream.unused_data)
            # Without input a stream may still hold output for which there was no room.
            if not step and not out:
                break
        self._rest = data[at:]
        return bytes(unpacked)

    def _stream_for(self, step: bytes) -> "zlib._Decompress | None":
        """The stream that `step` goes on with or begins; None while it is too short to tell."""
        if self._stream is not None and self._stream.eof and step:
            if self._coding != "gzip":
                raise InvalidRequestError(f"more bytes follow the end of the {self._coding} body")
            self._stream = None
        if self._stream is None and len(step) >= 2:
            self._stream = zlib.decompressobj(self._window_bits(step))
        return self._stream

    def finish(self) -> None:
        """Raises InvalidRequestError if the stream has not ended."""
        if self._stream is None or not self._stream.eof:
            raise InvalidRequestError(f"the {self._coding} body is cut off")

    def _window_bits(self, data: bytes) -> int:
        if self._coding == "gzip":
            return _GZIP_BITS
        # RFC 9110 means zlib's format by "deflate"; some clients send the bare stream.
        is_zlib = data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0
        return _ZLIB_BITS if is_zlib else -_ZLIB_BITS


def unpacker_of(request: Request) -> Unpacker | None:
    """None for a plain body; raises HTTPException 415 for a coding that is not read here."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip", "deflate"):
        return Unpacker(coding.removeprefix("x-"))
    raise HTTPException(
        415,
        f"Content-Encoding {coding[:80]!r} is not read here: send one of {ACCEPTED}, or none",
        {"Accept-Encoding": ACCEPTED},
    )
