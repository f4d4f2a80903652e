"""Beam search: the token ids and scores of `transformers`, for decoders alone and behind an encoder."""

import pytest
import torch
from toy_decoders import VOCAB, Causal, Recurrent, Seq2Seq, padded, twin

from regard.generation.config import GenerationConfig
from regard.generation.loop import generate

GIVEN, MASK = padded(7, 3, 5)
START = torch.zeros(3, 1, dtype=torch.long)


def beams(width, *, returned=1, **options):
    return GenerationConfig(num_beams=width, num_return_sequences=returned, **options)


def theirs(model, config, *, eos_token_ids=None, **options):
    """Ids (R, n) and scores (R,) of `transformers`: a source for an encoder, else a prompt, which is cut off."""
    out = model.generate(
        GIVEN,
        attention_mask=MASK.long(),
        num_beams=config.num_beams,
        length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
        early_stopping=config.early_stopping or False,
        num_return_sequences=config.num_return_sequences,
        eos_token_id=eos_token_ids,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    start = 1 if model.config.is_encoder_decoder else GIVEN.shape[1]
    return out.sequences[:, start:], out.sequences_scores


def ours(model, config, **options):
    if model.config.is_encoder_decoder:
        return generate(Seq2Seq(model, GIVEN, MASK), START, None, config, **options)
    return generate(Causal(model), GIVEN, MASK, config, **options)


def assert_same(made, want, scores):
    """Equal tokens up to each row's end; `transformers` may write the end token after it, where we write padding."""
    assert made.ids.shape == want.shape
    inside = torch.arange(want.shape[1]) < torch.tensor(made.lengths)[:, None]
    assert torch.equal(made.ids[inside], want[inside])
    assert (made.ids[~inside] == 0).all()
    # Our prompt is read once and repeated, theirs is read once for each beam: products of other shapes round otherwise.
    assert torch.allclose(made.scores, scores, rtol=1e-5, atol=1e-5)


def ends_of(model, width):
    """Two tokens that a search without an end comes to say, one of them soon: as ends they are hit early."""
    said = ours(model, beams(width), max_new_tokens=12).ids
    return [int(said[0, 3]), int(said[1, 5])]


FAMILIES = pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])


@FAMILIES
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("seed", [1, 4])
def test_ids_are_those_of_transformers_with_and_without_an_end(family, width, seed):
    model = twin(family, seed)
    ends = ends_of(model, width)
    hit = 0
    for eos in (None, ends[0], ends):
        config = beams(width, returned=width)
        made = ours(model, config, max_new_tokens=17, eos_token_ids=eos)
        assert_same(made, *theirs(model, config, max_new_tokens=17, eos_token_ids=eos))
        hit += made.reasons.count("eos")
    assert hit > 0


@FAMILIES
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 2.0])
def test_length_penalty_and_early_stopping_are_those_of_transformers(family, early, penalty):
    model = twin(family, 2)
    config = beams(4, length_penalty=penalty, early_stopping=early, returned=3)
    eos = ends_of(model, 4)
    made = ours(model, config, max_new_tokens=13, eos_token_ids=eos)
    assert_same(made, *theirs(model, config, max_new_tokens=13, eos_token_ids=eos))


def test_length_penalty_and_early_stopping_change_what_is_found():
    model = twin("gpt2", 2)
    eos, found = ends_of(model, 4), set()
    for early in (False, True, "never"):
        for penalty in (-1.0, 2.0):
            made = ours(
                model, beams(4, length_penalty=penalty, early_stopping=early), max_new_tokens=13, eos_token_ids=eos
            )
            found.add(str(made.ids.tolist()))
    assert len(found) >= 3


@FAMILIES
def test_two_hundred_tokens_are_those_of_transformers(family):
    model, config = twin(family, 1), beams(4)
    made = ours(model, config, max_new_tokens=200)
    assert made.ids.shape == (3, 200)
    assert made.ids.unique().numel() > 5
    assert_same(made, *theirs(model, config, max_new_tokens=200))


@FAMILIES
@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6},
        {"suppress_tokens": ()},  # chosen inside: what would have been said
        {"forced_eos_token_id": 7},
        {"repetition_penalty": 1.4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_filters_run_on_every_beam_as_in_transformers(family, options, monkeypatch):
    model, config = twin(family, 1), beams(4, returned=2)
    if family == "gpt2":  # theirs counts padding among what was said, ours does not: compare without padding
        monkeypatch.setitem(globals(), "GIVEN", padded(5, 5, 5)[0])
        monkeypatch.setitem(globals(), "MASK", padded(5, 5, 5)[1])
    eos = ends_of(model, 4) if "min_new_tokens" in options else None
    without = ours(model, config, max_new_tokens=12, eos_token_ids=eos)
    if "suppress_tokens" in options:
        options = {"suppress_tokens": without.ids.flatten().bincount().topk(2).indices.tolist()}
    made = ours(model, config, max_new_tokens=12, eos_token_ids=eos, **options)
    assert_same(made, *theirs(model, config, max_new_tokens=12, eos_token_ids=eos, **options))
    assert (made.lengths, made.ids.tolist()) != (without.lengths, without.ids.tolist())


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_forced_first_token_is_that_of_transformers(family):
    model, config = twin(family, 5), beams(5, returned=5)
    options = {"max_new_tokens": 9, "eos_token_ids": 2, "forced_bos_token_id": 6, "min_length": 5}
    made = ours(model, config, **options)
    assert_same(made, *theirs(model, config, **options))
    assert made.ids[:, 0].tolist() == [6] * 15


def test_ties_are_broken_as_in_transformers():
    model = twin("gpt2", 6)
    with torch.no_grad():
        for table in (model.transformer.wte.weight, model.lm_head.weight):
            table.copy_(table[torch.arange(VOCAB) // 2])  # tokens in pairs
    for config in (beams(4, returned=4), beams(5, returned=5)):
        made = ours(model, config, max_new_tokens=9, eos_token_ids=4)
        assert_same(made, *theirs(model, config, max_new_tokens=9, eos_token_ids=4))
        assert made.scores.unique().numel() < made.scores.numel()  # there are ties


# ------------------------------------------------------------------------------------------------- without transformers


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_length": 8}])
def test_padding_does_not_change_what_is_found(options):
    decoder, config = Recurrent(1), GenerationConfig(max_new_tokens=9, eos_token_ids=4, num_beams=3, **options)
    together = generate(decoder, GIVEN, MASK, config)
    for row in range(3):
        alone = generate(decoder, GIVEN[row][MASK[row]][None], None, config)
        n = alone.lengths[0]
        assert together.ids[row, :n].tolist() == alone.ids[0].tolist()
        assert together.lengths[row] == n


def test_beams_as_many_as_there_are_sequences_find_the_best_of_all():
    decoder, prompt = Recurrent(2, vocab=5), torch.tensor([[3]])
    made = generate(decoder, prompt, max_new_tokens=3, num_beams=25, length_penalty=0.0)
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)  # (125, 3)
    with torch.no_grad():
        logits, state = decoder.begin(prompt.expand(125, 1), None, length=4)
        total = torch.zeros(125)
        for n in range(3):
            total += logits.log_softmax(-1).gather(1, every[:, n, None])[:, 0]
            logits = decoder.step(state, every[:, n])
    assert made.ids[0].tolist() == every[total.argmax()].tolist()
    assert torch.allclose(made.scores[0], total.max())


def test_one_beam_is_greedy():
    decoder = Recurrent(3)
    greedy = generate(decoder, GIVEN, MASK, max_new_tokens=9, eos_token_ids=4)
    assert torch.equal(generate(decoder, GIVEN, MASK, max_new_tokens=9, eos_token_ids=4, num_beams=1).ids, greedy.ids)
    assert greedy.scores is None


def test_the_prompt_is_read_once_a_row_and_no_step_runs_after_the_last_token():
    decoder = Recurrent(4)
    generate(decoder, GIVEN, MASK, max_new_tokens=9, num_beams=4)
    assert decoder.begun == [{"shape": (3, 7), "length": 15}]  # 7 read, and 8 of the 9 new ones
    assert decoder.steps == 8


def test_rows_come_best_first_with_reasons_and_texts():
    decoder = Recurrent(5)
    eos = int(generate(decoder, GIVEN, MASK, max_new_tokens=9, num_beams=4).ids[0, 4])
    made = generate(
        decoder,
        GIVEN,
        MASK,
        max_new_tokens=9,
        eos_token_ids=eos,
        num_beams=4,
        num_return_sequences=3,
        decode=lambda ids: str(ids),
    )
    assert made.ids.shape[0] == len(made.lengths) == len(made.reasons) == len(made.texts) == 9
    assert torch.equal(made.scores.view(3, 3).sort(1, descending=True).values, made.scores.view(3, 3))
    assert set(made.reasons) == {"eos", "length"}
    for row, n, why, text in zip(made.ids.tolist(), made.lengths, made.reasons, made.texts, strict=True):
        assert (row[n - 1] == eos) == (why == "eos")
        assert eos not in row[: n - 1]
        assert text == str(row[: n - 1] if why == "eos" else row)


def test_steps_are_told():
    told = []
    generate(Recurrent(6), GIVEN, MASK, max_new_tokens=5, num_beams=2, on_token=told.append)
    assert told == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: beams(0), ValueError, r"beams.*1.*0"),
        (lambda: beams(2.0), TypeError, r"beams.*float.*2.0"),
        (lambda: beams(4, returned=5), ValueError, r"4.*5"),
        (lambda: beams(4, returned=0), ValueError, r"num_return_sequences.*1.*0"),
        (lambda: beams(4, early_stopping="soon"), ValueError, r"early_stopping.*True.*False.*'never'.*'soon'"),
    ],
)
def test_beams_that_make_no_sense_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def run(**options):
    return generate(Recurrent(7), GIVEN, MASK, max_new_tokens=5, **options)


def test_beams_with_sampling_are_not_offered():
    with pytest.raises(ValueError, match=r"beam.*sampling.*num_beams=1"):
        run(num_beams=2, top_k=5)


def test_beams_with_stop_strings_are_not_offered():
    with pytest.raises(ValueError, match=r"beam.*stop.*num_beams=1"):
        run(num_beams=2, stop_strings="x", decode=str)


def test_fewer_than_one_beam_is_refused_by_generate():
    with pytest.raises(ValueError, match=r"beams.*1.*0"):
        run(num_beams=0)


def test_scores_that_are_nan_are_an_error():
    decoder = Recurrent(8)
    with torch.no_grad():
        decoder.head.bias[3] = torch.nan
    with pytest.raises(ValueError, match=r"beams.*NaN"):
        generate(decoder, GIVEN, MASK, max_new_tokens=5, num_beams=2)
