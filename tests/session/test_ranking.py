"""Which links of a text are worth a look, and which tokens are words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeing_twins import picture, swin, vit
from speaking_twins import bert, gpt2, t5
from unpacking import unpacked

import regard
from regard.explorer import answers
from regard.lens.capture import Capture
from regard.lens.overlays import ImagePatches
from regard.models.loading import load
from regard.session import ranking
from regard.session.heads import Layer
from regard.session.labels import LONGEST, find_word, is_word, shown, spelled, word_numbers
from regard.session.ranking import obstacle, ranked_links, strongest
from regard.session.session import Session, look_at, look_at_image
from regard.tables import width

WORDS = ("[CLS]", "the", "token", "##ization", "of", "words", ".")


def attention(heads: int, n: int, seed: int, words: tuple[str, ...] = WORDS) -> tuple[Session, list[Layer]]:
    """A session of two layers of random weights."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for index in range(2):
        x = torch.randn(3, 1, heads, n, 5, generator=generator) * 2
        layers.append(Layer(index, f"layers.{index}", regard.look(*x), 0))
    return Session("toy", Capture(), words), layers


def by_hand(session: Session, layers: list[Layer], every: bool) -> list[tuple[float, int, int, int, int]]:
    """The ranking as its definition reads, one weight after the other: score, layer, head, query, key."""
    best: dict[tuple[int, int], tuple[float, int, int, int, int]] = {}
    words, numbers = session.tokens, word_numbers(session.tokens)
    for layer in layers:
        weights = layer.view.tile(slice(None), slice(None))[0].tolist()  # (H, Nq, Nk)
        for h, rows in enumerate(weights):
            for i, row in enumerate(rows):
                for j, weight in enumerate(row):
                    mean = sum(other[j] for other in rows) / len(rows)
                    apart = abs(i - j)
                    if apart == 0:
                        continue
                    score = weight if every else (weight - mean) * (1 - 1 / apart)
                    left_out = not (is_word(words[i]) and is_word(words[j])) or numbers[i] == numbers[j]
                    if (left_out and not every) or score <= 0:
                        continue
                    pair = (i, j) if every else (numbers[i], numbers[j])
                    if pair not in best or score > best[pair][0]:
                        best[pair] = (score, layer.index, h, i, j)
    return sorted(best.values(), reverse=True)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**23])
def test_ranking_is_its_definition_whatever_is_held_at_once(monkeypatch: Any, every: bool, at_once: int) -> None:
    monkeypatch.setattr(ranking, "AT_ONCE", at_once)
    session, layers = attention(3, 7, seed=1)
    wanted = by_hand(session, layers, every)
    found = strongest(session, layers, count=100, every=every)
    assert [tuple(link[:4]) for link in found] == [one[1:] for one in wanted]
    for link in found:
        exact = layers[link.layer].view.row(link.query)[0, link.head, link.key]
        assert link.weight == pytest.approx(float(exact), rel=1e-6)
    assert strongest(session, layers, count=3, every=every) == found[:3]


def test_links_of_words_leave_out_neighbours_specials_and_pieces_of_one_word() -> None:
    session, layers = attention(3, 7, seed=2)
    pairs = {(link.query, link.key) for link in strongest(session, layers, count=100)}
    assert pairs != set()
    assert all(abs(i - j) > 1 and 0 not in (i, j) and 6 not in (i, j) for i, j in pairs)
    every = {(link.query, link.key) for link in strongest(session, layers, count=100, every=True)}
    assert {(0, 6), (2, 3)} <= every
    assert all(i != j for i, j in every)


def test_one_head_and_some_tokens_are_ranked_alone() -> None:
    session, layers = attention(3, 7, seed=3)
    found = strongest(session, layers[1:], count=100, head=2, queries=[1, 5])
    assert {(link.layer, link.head) for link in found} == {(1, 2)}
    assert {link.query for link in found} <= {1, 5}
    for link in found:
        assert link.weight == pytest.approx(float(layers[1].view.row(link.query)[0, 2, link.key]), rel=1e-6)


def test_key_that_everything_looks_at_is_not_interesting() -> None:
    k = torch.eye(6)
    q = torch.full((6, 6), 0.0)
    q[:, 0] = 9.0  # everything looks at key 0
    q[5] = torch.tensor([0.0, 0, 9, 0, 0, 0])  # but for the last, which looks at key 2
    layer = Layer(0, "attn", regard.look(*(x.view(1, 1, 6, 6) for x in (q, k, k))), 0)
    session = Session("toy", Capture(), ("a", "b", "c", "d", "e", "f"))
    assert tuple(strongest(session, [layer], count=1)[0][2:4]) == (5, 2)


def test_layers_of_other_tokens_have_no_place_in_the_text(tmp_path: Path) -> None:
    session = look_at("The cat sat on the mat.", t5(tmp_path / "t5"))
    layers = session.layers
    assert [layer.start is None for layer in layers] == [False, False, True, True, True, True]
    assert {link.layer for link in strongest(session, layers, count=20)} <= {0, 1}
    assert obstacle(layers[2:]) == "weights"


def test_causal_model_looks_back(tmp_path: Path) -> None:
    session = look_at("The cat sat on the mat.", gpt2(tmp_path / "gpt2"))
    found = strongest(session, session.layers, count=20)
    assert found != []
    assert all(link.key < link.query for link in found)


def test_too_many_weights_and_none_at_all_are_told(monkeypatch: Any, tmp_path: Path) -> None:
    _, layers = attention(3, 7, seed=4)
    assert obstacle(layers) is None
    monkeypatch.setattr(ranking, "MOST", 2 * 3 * 7 * 7 - 1)
    assert obstacle(layers) == "length"
    assert obstacle(layers, queries=[3]) is None
    model = regard.load(bert(tmp_path / "bert", "Model"))
    with regard.watch(model) as seen:
        model(model.tokenizer.batch(["a cat"]).input_ids)
    assert obstacle(Session("bare", seen, ("[CLS]", "a", "cat", "[SEP]")).layers) == "weights"


# --------------------------------------------------------------------------------------------------------------- words


def test_words_are_neither_special_nor_punctuation() -> None:
    words = ["cat", " cat", "##ing", "고양이", "3", "naïve", "\\xec", "<0xEC>", ""]
    others = ["[CLS]", "[SEP]", "[PAD]", "[unused1]".upper(), "<s>", "</s>", "<|endoftext|>", ".", " ,", "'", "…", " "]
    assert [word for word in words if not is_word(word)] == []
    assert [word for word in others if is_word(word)] == []


@given(st.text(max_size=60))
def test_shown_labels_are_one_safe_line_of_a_known_width(label: str) -> None:
    text = shown(label)
    assert all(letter.isprintable() for letter in text)
    assert len(text) <= LONGEST
    assert bool(text) is bool(label)
    assert width(text) >= len(text) * bool(text.isascii())


def test_jamo_by_themselves_are_letters_that_have_a_width() -> None:
    assert [shown(f"##{jamo}") for jamo in ("\u1109", "\u1165", "\u11ab")] == ["##ㅅ", "##ㅓ", "##ㄴ"]
    assert shown("\u1109\u1165") == "서"


@pytest.mark.parametrize(
    ("labels", "wanted", "found"),
    [
        (["[CLS]", "The", "cat", "the"], "the", [range(1, 2), range(3, 4)]),
        (["didn", "'", "t", "did"], "didn't", [range(3)]),
        ([" c", "at", " cat"], "cat", [range(2), range(2, 3)]),
        (["\u1109", "##\u1165", "##\u110b", "##\u116e", "##\u11af"], "서울", [range(5)]),
        (["CAFÉ"], "café", [range(1)]),
        (["a", "b"], "c", []),
        (["a", "b"], " ", []),
        ([""] * 200_000, "a", []),  # unknown ones, in linear time
        ([" ", "cat"], "cat", [range(1, 2)]),
    ],
)
def test_word_is_found_in_its_pieces(labels: list[str], wanted: str, found: list[range]) -> None:
    assert find_word(labels, wanted) == found


def test_pieces_share_the_number_of_their_word() -> None:
    assert word_numbers(["The", " un", "believ", "able", ",", " cat", "<|endoftext|>", "a"]) == [0, 1, 1, 1, 2, 3, 4, 5]
    assert word_numbers(["a", "##", "##b"]) == [0, 1, 1]
    assert word_numbers(["", "", ""]) == [0, 1, 2]
    assert word_numbers([]) == []
    assert spelled([" 고", "양이"]) == "고양이"


# -------------------------------------------------------------------------------------------------- of a whole session


def test_links_of_a_session_are_those_that_the_terminal_ranks(tmp_path, monkeypatch):
    session = look_at("The animal did not cross the street because it was too tired.", bert(tmp_path / "bert", "Model"))
    links, complete = ranked_links(session, 5)
    assert complete
    assert links == strongest(session, session.layers, count=5)
    monkeypatch.setattr(ranking, "FIRST_LOOK", sum(4 * len(session.tokens) for _ in session.layers) * 7)  # 7 tokens
    again = look_at(session.text, session.model)
    sampled, complete = ranked_links(again, 5)
    assert not complete
    best = {(link.layer, link.head): score for score, link in again.ranked.values()}
    assert [link[:2] for link in sampled] == sorted(best, key=lambda place: -best[place])[: len(sampled)]
    assert len({link[2:4] for link in sampled}) == len(sampled)


def patch_links_by_hand(session: Session) -> list[tuple[float, tuple[int, int, int, int]]]:
    """As the definition reads: weight beyond the key's mean, near patches less; (score, (layer, head, query, key))."""
    best: dict[tuple[Any, ...], tuple[float, tuple[int, int, int, int]]] = {}
    for layer in session.layers:
        (_, heads, nq, nk), sides = layer.view.sizes, layer.sides
        weights = layer.view.tile(slice(None), slice(None))[: layer.windows]
        places = []
        for layout in (sides.queries, sides.keys):
            patches = ImagePatches(layout, sides.frames[0], 0)
            cells = {tuple(token): cell for token, cell in zip(patches.tokens.tolist(), patches.cells, strict=True)}
            places.append({token: cell for n, (token, cell) in enumerate(cells.items()) if not patches.beyond[n]})
        for w in range(layer.windows):
            for h in range(heads):
                for i in range(nq):
                    for j in range(nk):
                        if (w, j) not in places[1] or sides.queries.kind[w, i] not in ("patch", "cls"):
                            continue
                        score = float(weights[w, h, i, j] - weights[w, h, :, j].mean())
                        if (w, i) in places[0]:
                            apart = max(abs(places[0][w, i] - places[1][w, j]))
                            score *= 1 - 1 / max(1, apart)
                        elif sides.queries.kind[w, i] == "patch":
                            continue
                        at = (sides.queries, sides.keys, w, i, j)
                        if score > best.get(at, (0.0,))[0]:
                            best[at] = score, (layer.index, h, w * nq + i, w * nk + j)
    return sorted(best.values(), key=lambda one: (-one[0], one[1]))


@pytest.mark.parametrize("make", [vit, swin])
@pytest.mark.parametrize("at_once", [1, 2**23])
def test_links_of_an_image_lead_to_patches_and_rank_far_before_near(tmp_path, monkeypatch, make, at_once):
    monkeypatch.setattr(ranking, "AT_ONCE", at_once)
    session = look_at_image(picture(), load(make(tmp_path / "model")))
    links, complete = ranked_links(session, 6)
    assert complete
    expected = patch_links_by_hand(session)[:6]
    assert len(links) == 6
    assert [tuple(link[:4]) for link in links] == [place for _, place in expected]
    for link in links:
        row = answers.row(session, link.layer, link.head, link.query)
        assert link.weight == pytest.approx(float(unpacked(row["weights"])[link.key]), rel=1e-5)


def test_queries_of_a_large_image_are_sampled(tmp_path, monkeypatch):
    session = look_at_image(picture(), load(vit(tmp_path / "vit")))
    _, heads, nq, nk = session.layers[0].view.sizes
    monkeypatch.setattr(ranking, "FIRST_LOOK", len(session.layers) * heads * nq * nk // 3)
    links, complete = ranked_links(session, 6)
    assert not complete
    assert {link.query % 4 for link in links} == {0}
