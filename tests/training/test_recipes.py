import math

import numpy as np
import pytest
import torch

import regard
from regard.models.losses import IGNORED
from regard.training.data import row_generator
from regard.training.recipes import Infilling, MaskedLM, SpanCorruption
from regard.training.recipes.labelled_texts import label_number
from regard.training.tokenizers import train_bpe

MASK, SPECIAL, VOCABULARY = 4, (0, 1, 2, 3, 4), 1000


def rngs(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [row_generator(seed, 0, row) for row in range(count)]


def masked(**options) -> MaskedLM:
    defaults = {"length": 128, "mask_token_id": MASK, "vocab_size": VOCABULARY, "special_ids": SPECIAL}
    return MaskedLM(**defaults | {"start_ids": (2,), "end_ids": (3,)} | options)


def within(count: int, trials: int, probability: float) -> bool:
    """Is a binomial count within four standard deviations? A right rate fails once in 16,000 draws; seeds are fixed."""
    return abs(count - trials * probability) <= 4 * math.sqrt(trials * probability * (1 - probability))


def test_masking_has_the_rates_of_the_paper():
    rows = [torch.from_numpy(rng.integers(5, VOCABULARY, 126)) for rng in rngs(400, seed=9)]
    batch = masked().batch(rows, rngs(400))
    original = torch.stack([torch.tensor([2, *row.tolist(), 3]) for row in rows])
    chosen = batch["labels"] != IGNORED
    assert (batch["labels"][chosen] == original[chosen]).all()
    assert (batch["input_ids"][~chosen] == original[~chosen]).all()
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    count = int(chosen.sum())
    assert within(count, 400 * 126, 0.15)
    became = batch["input_ids"][chosen]
    hidden = became == MASK
    drawn = ~hidden & (became != original[chosen])
    assert within(int(hidden.sum()), count, 0.8)
    assert within(int(drawn.sum()), count, 0.1 * (1 - 1 / (VOCABULARY - len(SPECIAL))))
    assert not np.isin(became[drawn].numpy(), SPECIAL).any()


def test_whole_words_are_chosen_together():
    ids = np.tile([10, 501, 502, 11, 12, 503], 200)
    _, labels = masked(continuations=tuple(range(500, 600)), probability=0.3).hide(ids, rngs(1)[0])
    chosen = (labels != IGNORED).reshape(-1, 6)
    assert (chosen[:, 0] == chosen[:, 1]).all()
    assert (chosen[:, 1] == chosen[:, 2]).all()
    assert (chosen[:, 4] == chosen[:, 5]).all()
    assert within(int(chosen[:, [0, 3, 4]].sum()), 600, 0.3)


@pytest.mark.parametrize("pairs", ["next-sentence", "sentence-order"])
def test_pairs_are_right_half_of_the_time(pairs):
    from regard.training.recipes.mlm import SegmentPairs

    documents = [[np.array([10 * d + s + 5]) for s in range(4)] for d in range(40)]
    rows = SegmentPairs(documents, pairs)
    recipe = masked(pairs=pairs)
    draws = [recipe.choose_pair(row, rng) for _ in range(5) for row, rng in zip(rows, rngs(len(rows)), strict=True)]
    for first, second, label in draws:
        step = int(second[0] - first[0])
        assert (step == 1) == (label == 0)
        assert pairs == "next-sentence" or abs(step) == 1
        assert label == 0 or pairs == "sentence-order" or abs(second[0] // 10 - first[0] // 10) >= 0
    assert within(sum(label for *_, label in draws[: len(rows)]), len(rows), 0.5)
    batch = recipe.batch([rows[0], rows[1]], rngs(2))
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1]
    assert batch[pairs.replace("-", "_") + "_label"].shape == (2,)


def spans(**options) -> SpanCorruption:
    return SpanCorruption(length=114, sentinel_ids=tuple(range(900, 1000)), end_token_id=1, **options)


def test_span_corruption_loses_nothing_and_has_the_rates_of_the_paper():
    recipe, removed, count = spans(), 0, 0
    for random in rngs(300):
        ids = random.integers(10, 900, 114)
        source, target = recipe.corrupt(ids, random)
        assert source[-1] == target[-1] == 1
        parts = {int(part[0]): part[1:] for part in np.split(target[:-1], np.flatnonzero(target[:-1] >= 900))[1:]}
        rebuilt = np.concatenate([parts[int(x)] if x >= 900 else [x] for x in source[:-1]])
        assert (rebuilt == ids).all()
        assert list(parts) == list(range(900, 900 + len(parts)))  # in the order of the text
        removed += sum(map(len, parts.values()))
        count += len(parts)
    assert removed == 300 * round(114 * 0.15)
    assert count == 300 * round(17 / 3)  # mean span 17 / 6


def test_span_corruption_needs_a_sentinel_for_each_span():
    with pytest.raises(ValueError, match="2 sentinel"):
        SpanCorruption(length=114, sentinel_ids=(900, 901), end_token_id=1)


def infilling(**options) -> Infilling:
    return Infilling(**{"length": 200, "mask_token_id": 4, "start_token_id": 0, "end_token_id": 2} | options)


def test_infilling_removes_the_share_of_the_paper_in_poisson_spans():
    recipe, masks, kept = infilling(), 0, 0
    for random in rngs(300):
        ids = random.integers(10, 900, 160)
        filled = recipe.infill(ids, random)
        stays = filled[filled != 4].tolist()
        rest = iter(ids.tolist())
        assert all(token in rest for token in stays)  # in order
        masks += int((filled == 4).sum())
        kept += len(stays)
    assert kept == 300 * (160 - 48)
    # 48 tokens in spans of 3 on average, the last one cut: 16 to 17 spans.
    assert abs(masks / 300 - 48 / 3) < 1


def test_infilling_shuffles_whole_sentences_and_asks_for_the_original():
    row = [[10, 11], [20, 21, 22], [30]]
    batch = infilling(density=0.01).batch([row] * 30, rngs(30))
    assert batch["labels"].tolist() == [[0, 10, 11, 20, 21, 22, 30, 2]] * 30
    orders = {tuple(x for x in line if x % 10 == 0 and x) for line in batch["input_ids"].tolist()}
    assert len(orders) == 6
    unshuffled = infilling(density=0.01, permute=False).batch([row], rngs(1))
    assert unshuffled["input_ids"].tolist() == [[0, 10, 11, 20, 21, 22, 30, 2]]


@pytest.mark.parametrize("recipe", [masked(), spans(), infilling()], ids=["mlm", "span-corruption", "infilling"])
def test_batches_are_functions_of_the_rows_random_numbers(recipe):
    ids = torch.arange(10, 124)
    rows = [[ids.tolist()[:50], ids.tolist()[50:100]]] * 3 if isinstance(recipe, Infilling) else [ids] * 3
    whole = recipe.batch(rows, rngs(3))
    again = recipe.batch(rows, rngs(3))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    second = recipe.batch(rows[1:2], rngs(3)[1:2])
    width = second["input_ids"].shape[1]
    assert torch.equal(whole["input_ids"][1:2, :width], second["input_ids"])
    assert not torch.equal(whole["input_ids"][0], whole["input_ids"][1])


def test_labels_are_names_or_numbers():
    assert label_number("dog", ("cat", "dog"), 0) == label_number("1", ("cat", "dog"), 0) == 1
    for wrong in ("cow", 2, -1, None):
        with pytest.raises(ValueError, match=r"row 7.*cat.*dog"):
            label_number(wrong, ("cat", "dog"), 7)


def test_token_labels_go_to_the_first_token_of_a_word():
    tokenizer = train_bpe(["unbelievable things happen"] * 3, 280)
    model = regard.build(
        "bert", task="token-classification", vocab_size=280, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=64, type_vocab_size=2,
    )  # fmt: skip
    model.tokenizer = tokenizer
    recipe = regard.recipes.TokenClassification(labels=("O", "X"), length=40, pad_token_id=0)
    ((ids, _, labels),) = recipe.rows([{"tokens": ["un", "believable"], "labels": ["X", "O"]}], model, training=True)
    assert len(ids) == len(labels)
    assert [label for label in labels if label != IGNORED] == [1, 0]
    assert tokenizer.decode(ids[: labels.index(0)]).strip() == "un"


def test_answers_become_token_positions():
    tokenizer = train_bpe(["where is the tower the tower is in Paris"] * 3, 300)
    model = regard.build(
        "bert", task="question-answering", vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=64, type_vocab_size=2,
    )  # fmt: skip
    model.tokenizer = tokenizer
    recipe = regard.recipes.QuestionAnswering(length=64)
    row = {"question": "where is the tower", "context": "the tower is in Paris", "answer": "Paris"}
    ((ids, _, start, end),) = recipe.rows([row], model, training=True)
    assert tokenizer.decode(ids[start : end + 1]).strip() == "Paris"
    with pytest.raises(ValueError, match="London"):
        recipe.rows([row | {"answer": "London"}], model, training=True)
