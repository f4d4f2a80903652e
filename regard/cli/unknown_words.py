"""What a model read without having a word for it: a Korean word may be one [UNK] to an English model, whatever it says.

It does not know the terminal, nor attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cli.language import Lang, speaker

if TYPE_CHECKING:
    from regard.explorer.sessions import Session

__all__ = ["unknown_words"]

MOST_SHOWN = 8  # words that are named


def unknown_words(session: Session, lang: Lang) -> str | None:
    """How many tokens of a session's text are unknown to its model, and which; None for none, or without a model.

    >>> unknown_words(look_at("나는 고양이를 보았다."), "en")                      # doctest: +SKIP
    '2 of 10 tokens are unknown to this model ([UNK]): 고양이를, 보았다'
    """
    if session.model is None or session.text is None:
        return None
    tokenizer = session.model.tokenizer
    if (unk := tokenizer.ids_of.unk) is None:
        return None
    (sign,), read = tokenizer.tokens([unk]), tokenizer.encode(session.text)
    spans = [span for number, span in zip(read.ids, read.offsets, strict=True) if number == unk and span is not None]
    words = [
        word for start, end in spans if (word := session.text[start:end]) != sign
    ]  # a sign that was typed is known
    if not words:
        return None
    some = ", ".join(words[:MOST_SHOWN]) + (" …" if len(words) > MOST_SHOWN else "")
    count, whole = f"{len(words):,}", f"{len(read.ids):,}"
    return speaker(lang)(
        f"{count} of {whole} tokens {'are' if words[1:] else 'is'} unknown to this model ({sign}): {some}",
        f"토큰 {whole}개 중 {count}개는 이 모델이 모르는 말입니다({sign}): {some}",
    )
