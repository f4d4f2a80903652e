"""A word exchanged for another: the changed text, aligned tokens, and the heads that changed, against dense weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from seeing_twins import picture, vit
from speaking_twins import bert, gpt2
from torch import Tensor

import regard
from regard.explorer import answers, jobs
from regard.explorer.jobs import ModelShelf
from regard.explorer.widget import answer
from regard.models.loading import load
from regard.models.model import Model
from regard.session import effects
from regard.session.effects import align, changed_heads, swap_word, swapped_text
from regard.session.session import Session, look_at, look_at_image, session_of

TEXT = "The animal did not cross the street because it was too tired."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("bert"), "Model")


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load(directory)


@pytest.fixture
def session(model: Model) -> Session:
    return look_at(TEXT, model)


def eager(directory: Path, session: Session) -> Tensor:
    """(layers, H, N, N) of the same text in transformers."""
    twin = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    ids = session.model.tokenizer.batch([session.text]).input_ids
    with torch.no_grad():
        return torch.cat(twin(ids, output_attentions=True).attentions).double()


# ------------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("make", [lambda path: bert(path, "Model"), gpt2], ids=["bert", "gpt2"])
@pytest.mark.parametrize(("old", "new"), [("animal", "cat"), ("tired", "wide"), ("The", "A"), ("street", "large mat")])
def test_word_is_exchanged_and_nothing_else(tmp_path, make, old, new):
    made = look_at(TEXT, make(tmp_path / "model"))
    (places,) = [run for run in regard.session.labels.find_word(made.tokens, old) if made.text.count(old) == 1][:1]
    for token in places:  # any piece of the word stands for all of it
        assert swapped_text(made, token, f" {new} ") == TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("token", "word", "error", "words"),
    [
        (0, "cat", ValueError, r"0.*\[CLS\]"),
        (99, "cat", IndexError, "99"),
        (2, "  ", ValueError, "1 to 200"),
        (2, "x" * 201, ValueError, "201"),
    ],
)
def test_word_that_cannot_be_exchanged_is_named(session, token, word, error, words):
    with pytest.raises(error, match=words):
        swapped_text(session, token, word)


def test_session_without_a_text_has_no_word_to_exchange(tmp_path, session):
    image = look_at_image(picture(), load(vit(tmp_path / "vit")))
    for made in (image, session_of(session.capture)):
        with pytest.raises(ValueError, match="text"):
            swapped_text(made, 0, "cat")


def test_text_that_was_cut_is_cut_again(model):
    long = look_at(TEXT * 5, model, truncate=True)
    assert len(swap_word(long, 2, "extraterrestrial").tokens) == len(long.tokens) == model.max_positions


# ----------------------------------------------------------------------------------------------------------- the heads


def by_hand(a: Tensor, b: Tensor, groups: list[tuple[list[int], list[int]]]) -> Tensor:
    """(layers, H) the share of attention that moved, group by group."""

    def cell(x: Tensor, side: int, i: int, j: int) -> Tensor:
        return x[:, :, groups[i][side]][..., groups[j][side]].sum(-1).mean(-1)

    count = range(len(groups))
    rows = [sum((cell(a, 0, i, j) - cell(b, 1, i, j)).abs() for j in count) / 2 for i in count]
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("at_once", [1, 2**23])
@pytest.mark.parametrize(
    ("word", "middle"), [("cat", ([2], [2])), ("kettle", ([2], [2, 3, 4, 5, 6, 7])), ("the", ([2], [2]))]
)
def test_heads_are_ranked_by_what_moved(directory, session, monkeypatch, word, middle, at_once):
    monkeypatch.setattr(effects, "AT_ONCE", at_once)
    other = swap_word(session, 2, word)
    more = len(other.tokens) - len(session.tokens)
    assert more == len(middle[1]) - 1
    groups = [([i], [i]) for i in range(2)] + [middle]
    groups += [([i], [i + more]) for i in range(3, len(session.tokens))]
    expected = by_hand(eager(directory, session), eager(directory, other), groups)
    changes, complete = changed_heads(session, other)
    assert complete
    assert [change.moved for change in changes] == sorted((c.moved for c in changes), reverse=True)
    assert len(changes) == expected.numel()
    for change in changes:
        assert change.moved == pytest.approx(float(expected[change.layer, change.head]), abs=1e-6)


def test_as_many_tokens_give_the_numbers_of_compare(session):
    other = swap_word(session, 2, "cat")
    ours, _ = changed_heads(session, other)
    theirs = {(head.path, head.head): head.moved for head in regard.compare(session.capture, other.capture).heads}
    for change in ours:
        assert change.moved == pytest.approx(theirs[session.layers[change.layer].path, change.head], abs=1e-6)


def test_link_that_changed_most_is_between_words_and_has_both_weights(directory, session):
    other = swap_word(session, 2, "kettle")
    old, new = eager(directory, session), eager(directory, other)
    for change in changed_heads(session, other)[0]:
        (i, i2), (j, j2) = change.query, change.key
        piece = slice(2, 8)  # of the new word
        before = old[change.layer, change.head, i, j]
        rows = new[change.layer, change.head, piece].mean(0) if i == 2 else new[change.layer, change.head, i2]
        after = rows[piece].sum() if j == 2 else rows[j2]
        assert (change.before, change.after) == pytest.approx((float(before), float(after)), abs=1e-6)
        assert session.tokens[i][0] != "["
        assert session.tokens[j][0] not in "[."
        assert i != j


def test_rows_of_a_long_text_are_sampled(session, monkeypatch):
    other = swap_word(session, 2, "cat")
    whole = {change[:2]: change.moved for change in changed_heads(session, other)[0]}
    monkeypatch.setattr(effects, "FIRST_LOOK", 2 * 5 * len(session.tokens) ** 2 // 3)
    some, complete = changed_heads(session, other)
    assert not complete
    assert {change[:2] for change in some} == set(whole)


@pytest.mark.parametrize(
    ("a", "b", "before", "after"),
    [
        ("abcd", "abxd", 4, 0),
        ("abcd", "abxyd", 2, 1),
        ("abcd", "acd", 0, 2),
        ("aab", "aaab", 1, 1),
        ("ab", "xaby", 0, 0),
    ],
)
def test_tokens_are_aligned_from_both_ends(a, b, before, after):
    one, other = (Session("toy", regard.lens.capture.Capture(), tuple(text)) for text in (a, b))
    aligned = align(one, other)
    assert (aligned.before, aligned.after) == (before, after)
    for side, text in enumerate((a, b)):
        groups = aligned.numbers(side).tolist()
        assert set(groups) == set(range(aligned.groups))
        assert groups == sorted(groups)
        assert [aligned.first(group, side) for group in range(aligned.groups)] == [
            groups.index(group) for group in range(aligned.groups)
        ]
        assert len(groups) == len(text)


def test_sessions_without_common_layers_cannot_be_compared(session):
    layer = torch.nn.TransformerEncoderLayer(10, 5, 5, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer, keep="qk") as seen:
        layer(torch.randn(1, len(session.tokens), 10))
    with pytest.raises(LookupError, match="layers"):
        changed_heads(session, session_of(seen))


# ------------------------------------------------------------------------------------------ the server and the notebook


@pytest.fixture
def client(session: Session) -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="needs the server: pip install 'regard[explorer]'")
    pytest.importorskip("httpx", reason="needs fastapi's test client: pip install httpx")
    from browsing import BEARER, TOKEN
    from fastapi.testclient import TestClient

    from regard.explorer import server

    made = server.app([session], ModelShelf(demo=False), port=8126, token=TOKEN)
    with TestClient(made, base_url="http://127.0.0.1:8126", headers=BEARER) as client:
        yield client


def test_server_reads_the_changed_text_and_compares(client, session):
    job = client.post("/api/session/1/swap", json={"token": 2, "word": "cat"}).json()["job"]
    until = time.monotonic() + 120
    while (line := client.get(f"/api/job/{job}").json())["state"] not in jobs.ENDED:
        assert time.monotonic() < until, line
        time.sleep(0.01)
    assert (line["state"], line["session"]) == ("done", "2")
    assert client.get("/api/session/2/overview").json()["text"] == TEXT.replace("animal", "cat")
    got = client.get("/api/session/1/changes", params={"other": "2", "count": 3}).json()
    expected = answers.changes(session, swap_word(session, 2, "cat"), 3)
    assert got == expected
    assert got["heads"][0]["words"][0][0] in session.tokens
    sessions = [session]
    swap = {"id": 1, "session": "1", "ask": "swap", "given": {"token": 2, "word": "cat"}}
    assert answer(sessions, swap)["answer"] == {"session": "2"}
    assert (sessions[1].text, sessions[1].tokens[2]) == (TEXT.replace("animal", "cat"), "cat")
    changes = answer(sessions, {"id": 2, "session": "1", "ask": "changes", "given": {"other": "2"}})["answer"]
    assert changes["heads"][:3] == expected["heads"]


def test_server_refuses_a_word_before_the_job_starts(client):
    for body, status in (({"token": 0, "word": "cat"}, 400), ({"token": 99, "word": "cat"}, 404), ({"token": 1}, 422)):
        assert client.post("/api/session/1/swap", json=body).status_code == status
    assert client.get("/api/session/1/changes", params={"other": "9"}).status_code == 404
