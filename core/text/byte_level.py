"""The byte-level alphabet: GPT-2's one-to-one map between the 256 bytes and printable characters.

Bytes that print in Latin-1 stand for themselves; the other 68 are numbered from U+0100 in byte order
(Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

BYTE_OF_CHARACTER: dict[str, int] = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + rank): byte for rank, byte in enumerate(_OTHERS)
}


def bytes_of_byte_level(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with foreign characters is taken as UTF-8 text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()
