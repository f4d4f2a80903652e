"""Pieces: joined they are the whole text, no half character is shown, and the work for a token does not grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from regard.generation.streaming import MAX_UNKNOWN, MAX_WINDOW, TextPieces

SAID = "The cat 고양이가 앉았다 🐈‍⬛👩‍👩‍👧 naïve – ﷽!"


def of_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(decode, ids):
    pieces = TextPieces(decode)
    return [*(pieces.push(token) for token in ids), pieces.close()]


def test_hangul_and_emoji_come_whole():
    got = pieces_of(of_bytes, SAID.encode())
    assert "".join(got) == SAID
    assert all(len(piece) <= 1 for piece in got)  # as soon as the character's last byte is there
    assert "\ufffd" not in "".join(got)


@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_text_cut_into_tokens_anywhere_comes_back_whole(text, sizes):
    raw, chunks, at = text.encode(), [], 0
    while at < len(raw):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(raw[at : at + size])
        at += size
    got = pieces_of(lambda ids: b"".join(chunks[i] for i in ids).decode("utf-8", errors="replace"), range(len(chunks)))
    assert "".join(got) == text


@given(st.lists(st.one_of(st.text(min_size=1, max_size=9).map(str.encode), st.binary(min_size=1, max_size=2))))
def test_text_among_bad_bytes_comes_as_when_decoded_at_once(parts):
    raw = b" ".join(parts)
    assert "".join(pieces_of(of_bytes, raw)) == of_bytes(raw)


def test_an_unfinished_character_is_shown_as_unknown_only_at_the_end():
    assert pieces_of(of_bytes, "가".encode()[:2]) == ["", "", "\ufffd"]
    assert pieces_of(of_bytes, b"\xea\xb0a") == ["", "", "\ufffda", ""]


def test_endless_bad_bytes_are_let_through():
    got = pieces_of(of_bytes, b"\xff" * 40 + b"ok")
    assert "".join(got) == "\ufffd" * 40 + "ok"
    assert any(got[:10])  # and not only when a whole character comes
    assert max(len(piece) for piece in got) <= MAX_UNKNOWN + 2


def test_a_decoder_that_drops_the_first_space_keeps_the_others():
    words = ["▁The", "▁cat", "▁", "s", "at", "▁▁", "down", "</s>", "▁again"]

    def decode(ids):
        text = "".join("" if words[i] == "</s>" else words[i] for i in ids).replace("▁", " ")
        return text[1:] if text.startswith(" ") else text

    got = pieces_of(decode, range(len(words)))
    assert got == ["The", " cat", " ", "s", "at", "  ", "down", "", " again", ""]


def tokenizer(vocab, decoder):
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocab)}, merges=[]))
    made.decoder = decoder
    return lambda ids: made.decode(list(ids))


def test_byte_fallback_of_the_tokenizers_library_comes_whole():
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁고", "▁the", "양"]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    decode = tokenizer(vocab, decoder)
    ids = [257, 256, 258, *"이🐈‍⬛ 한글🐈".encode(), 257, *"é".encode(), 256]
    got = pieces_of(decode, ids)
    assert "".join(got) == decode(ids) == "the 고양이🐈‍⬛ 한글🐈 theé 고"
    assert "\ufffd" not in "".join(got)


def test_byte_level_of_the_tokenizers_library_comes_whole():
    text = "한 글🐈"
    ((letters, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    words = [letters[i : i + 2] for i in range(0, len(letters), 2)]  # 한₁₂ 한₃␣ 글₁₂ 글₃🐈₁ 🐈₂₃ 🐈₄
    vocab = [*dict.fromkeys(words)]
    got = pieces_of(tokenizer(vocab, decoders.ByteLevel()), [vocab.index(word) for word in words])
    assert got == ["", "한 ", "", "글", "", "🐈", ""]


@pytest.mark.parametrize("raw", [b"a" * 3000, "가".encode() * 1000, b"x\xea" * 1500, b"\xff" * 3000])
def test_the_tokens_decoded_do_not_grow_with_the_text(raw):
    longest = total = 0

    def decode(ids):
        nonlocal longest, total
        longest, total = max(longest, len(ids)), total + len(ids)
        return of_bytes(ids)

    pieces_of(decode, raw)
    assert longest <= 2 * MAX_WINDOW + 1
    assert total <= 2 * MAX_WINDOW * len(raw)


def test_tokens_without_text_are_forgotten_but_not_what_came_before():
    words = {0: "▁a", 1: "▁b", 2: ""}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    got = pieces_of(decode, [0, *([2] * (3 * MAX_WINDOW)), 1])
    assert "".join(got) == "a b"
