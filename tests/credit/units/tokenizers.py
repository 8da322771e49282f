"""Decoders of all common kinds, over small adversarial vocabularies."""

from collections.abc import Callable, Sequence

EURO, SMILE = "€".encode(), "😀".encode()
VOCABULARY: list[bytes] = [
    b"!",  # token id 0 is text, as in Qwen
    *(bytes([value]) for value in (*EURO, *SMILE)),
    EURO[:2],
    EURO[2:] + SMILE[:1],
    SMILE[1:],
    EURO[1:] + EURO[:1],  # ends one character and begins the next
    EURO,
    b"\n",
    b"\n\n",
    b".\n",
    b". ",
    b" ",
    b".",
    b"x",
    b"B",
    b"A",
    b"A.",
    b" B",
    b"\nB. x",
    b"<think>",
    b"</think>",
    b"</think",
    b">A",  # ends a thinking block and begins what is said
    b" a",
    "\ufffd".encode(),  # a replacement character in the text
    b"",  # a token without text
]


def byte_level(ids: Sequence[int]) -> str:
    """As GPT-2, Qwen and Llama 3 decode: bytes are joined, then read as UTF-8."""
    return b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "replace")


def sentence_piece(ids: Sequence[int]) -> str:
    """As Llama 2 decodes: the space at the start is dropped, and a run of single bytes is one text or all broken."""
    text, run = "", b""
    for i in [*ids, None]:
        piece = b"" if i is None else VOCABULARY[i]
        if len(piece) == 1 and piece[0] >= 0x80:
            run += piece
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + piece.decode("utf-8", "replace"), b""
    return text.removeprefix(" ")


class Counting:
    """A decoder that counts its calls."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode, self.calls, self.tokens = decode, 0, 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.calls += 1
        self.tokens += len(ids)
        return self.decode(ids)


def encode(text: str) -> list[int]:
    """Ids of a text that `VOCABULARY` can spell, the longest match first."""
    ids, data = [], text.encode()
    while data:
        token = max((t for t in VOCABULARY if t and data.startswith(t)), key=len)
        ids.append(VOCABULARY.index(token))
        data = data[len(token) :]
    return ids
