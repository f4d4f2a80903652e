"""Choosing: each filter is the one of `transformers`, to the bit; draws follow their probabilities, and only a seed."""

from dataclasses import replace
from math import inf

import pytest
import torch
import transformers.generation.logits_process as theirs
from hypothesis import given
from hypothesis import strategies as st

from regard.generation import config as options
from regard.generation.config import BLOCK, GenerationConfig, LogitsFilters, Sampler, UniformDraws, draw, warp

B, V, N = 3, 23, 11
CPU = torch.device("cpu")


def logits_and_seen(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, V, generator=generator) * 3
    logits[0, :4] = logits[0, 4]  # ties
    logits[1, 5] = -inf
    return logits, torch.randint(V, (B, N), generator=generator)


def prepared(config, *, eos=(), new_tokens=7, lengths=(N,) * B):
    config = replace(config, eos_token_ids=eos, max_new_tokens=new_tokens)
    return LogitsFilters(config, vocabulary=V, lengths=lengths, device=CPU)


# -------------------------------------------------------------------------------------------------------------- filters

PAIRS = {
    "penalise_repeats": (
        lambda x, seen: options.penalise_repeats(x, seen, 1.3),
        theirs.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    "encourage_repeats": (
        lambda x, seen: options.penalise_repeats(x, seen, 0.7),
        theirs.RepetitionPenaltyLogitsProcessor(0.7),
    ),
    **{
        f"prevent_ngrams_{n}": (
            lambda x, seen, n=n: options.prevent_ngrams(x, seen, n),
            theirs.NoRepeatNGramLogitsProcessor(n),
        )
        for n in (1, 2, 3, N, N + 1)
    },
    "ban": (
        lambda x, seen: options.ban(x, torch.tensor([2, 7])),
        theirs.NoBadWordsLogitsProcessor([[2], [7]], eos_token_id=[3]),
    ),
    "withhold": (
        lambda x, seen: options.withhold(x, torch.tensor([3, 5]), torch.tensor([True] * B)),
        theirs.MinLengthLogitsProcessor(N + 1, [3, 5]),
    ),
    "force": (
        lambda x, seen: options.force(x, 3, torch.tensor([True] * B)),
        theirs.ForcedEOSTokenLogitsProcessor(N + 1, 3),
    ),
    **{
        f"keep_top_{k}": (lambda x, seen, k=k: options.keep_top(x, k), theirs.TopKLogitsWarper(k))
        for k in (1, 2, 5, V, V + 9)
    },
    **{
        f"keep_nucleus_{p}": (lambda x, seen, p=p: options.keep_nucleus(x, p), theirs.TopPLogitsWarper(p))
        for p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)
    },
    **{
        f"keep_likely_{p}": (lambda x, seen, p=p: options.keep_likely(x, p), theirs.MinPLogitsWarper(p))
        for p in (0.0, 0.05, 0.5, 1.0)
    },
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("said", [V, 5])  # with 5 tokens everything repeats
def test_filter_is_that_of_transformers_and_leaves_its_input_alone(name, said):
    mine, yours = PAIRS[name]
    for seed in range(20):
        logits, seen = logits_and_seen(seed)
        seen, before = seen % said, logits.clone()
        assert torch.equal(mine(logits, seen), yours(seen, logits.clone()))
        assert torch.equal(logits, before)


def test_ids_beyond_the_vocabulary_are_no_tokens():
    logits, seen = logits_and_seen(1)
    outside = torch.cat([torch.full((B, 4), V), seen], 1)
    assert torch.equal(options.penalise_repeats(logits, outside, 1.3), options.penalise_repeats(logits, seen, 1.3))
    for n in (1, 2, 3):
        assert torch.equal(options.prevent_ngrams(logits, outside, n), options.prevent_ngrams(logits, seen, n))


def test_force_and_withhold_touch_only_their_rows():
    logits, rows = logits_and_seen(2)[0], torch.tensor([True, False, True])
    assert torch.equal(options.force(logits, 4, rows)[1], logits[1])
    assert torch.equal(options.withhold(logits, torch.tensor([4]), rows)[1], logits[1])
    assert options.force(logits, 4, rows)[0].tolist() == [0.0 if t == 4 else -inf for t in range(V)]


@given(st.integers(0, 10**6))
def test_filters_run_in_the_order_of_transformers(seed):
    logits, seen = logits_and_seen(seed)
    config = GenerationConfig(
        repetition_penalty=1.2, no_repeat_ngram_size=1, suppress_tokens=(2, 7), min_new_tokens=2, temperature=0.7
    )
    choice_and = GenerationConfig(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1)
    chain = theirs.LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.NoRepeatNGramLogitsProcessor(1),
            theirs.NoBadWordsLogitsProcessor([[2], [7]]),
            theirs.MinNewTokensLengthLogitsProcessor(N - 1, 2, [3]),
        ]
    )
    warpers = theirs.LogitsProcessorList(
        [
            theirs.TemperatureLogitsWarper(0.7),
            theirs.TopKLogitsWarper(9),
            theirs.TopPLogitsWarper(0.8),
            theirs.MinPLogitsWarper(0.1),
        ]
    )
    filtered = prepared(config, eos=(3,))(logits, seen, 1)
    assert torch.equal(filtered, chain(seen, logits.clone()))
    assert torch.equal(warp(logits, choice_and), warpers(seen, logits.clone()))


def test_a_choice_that_asks_for_nothing_gives_the_very_same_logits():
    logits, seen = logits_and_seen(3)
    assert prepared(GenerationConfig(), eos=(3,))(logits, seen, 0) is logits
    later = prepared(
        GenerationConfig(min_new_tokens=2, forced_bos_token_id=1, forced_eos_token_id=2), eos=(3,), lengths=(1,) * B
    )
    assert later(logits, seen, 3) is logits


def test_half_precision_is_filtered_in_single():
    logits, seen = logits_and_seen(4)
    half = logits.bfloat16()
    got = prepared(GenerationConfig(repetition_penalty=1.3))(half, seen, 0)
    assert torch.equal(got, options.penalise_repeats(half.float(), seen, 1.3))


def test_minimum_lengths_count_the_tokens_of_each_row():
    logits, seen = logits_and_seen(5)
    filters = prepared(GenerationConfig(min_new_tokens=2, min_length=7), eos=(3, 8), lengths=(2, 4, 11))

    def held(made):
        out = filters(logits, seen, made)
        assert torch.equal(out[:, 3] == -inf, out[:, 8] == -inf)
        return (out[:, 3] == -inf).tolist()

    assert [held(made) for made in (1, 2, 3, 4, 5)] == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, False, False],
        [False, False, False],
    ]


def test_forced_first_is_for_prompts_of_one_token_and_forced_last_for_the_last_place():
    logits, seen = logits_and_seen(6)
    filters = prepared(GenerationConfig(forced_bos_token_id=4, forced_eos_token_id=9), lengths=(1, 2, 1), new_tokens=5)
    best = [filters(logits, seen, made).argmax(-1).tolist() for made in range(5)]
    free = logits.argmax(-1).tolist()
    assert best == [[4, free[1], 4], free, free, free, [9, 9, 9]]


# ------------------------------------------------------------------------------------------------------------- sampling


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    many = 40_000
    token, total = draw(probs.log().expand(many, 5), torch.rand(many, dtype=torch.float64))
    counts = token.bincount(minlength=5) / many
    assert counts[[1, 4]].tolist() == [0.0, 0.0]
    # Five standard deviations of a share: √(p(1 − p)/n) ≤ 0.0025.
    assert (counts - probs).abs().max() < 0.0125
    assert torch.allclose(total, torch.ones(many, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_smallest_and_largest_draws_are_possible_tokens(u, token):
    logits = torch.tensor([[-inf, 1.0, 0.3, 2.0, -inf]])
    assert draw(logits, torch.tensor([u], dtype=torch.float64))[0].tolist() == [token]


def test_draws_depend_on_seed_row_and_step_alone():
    few, many = UniformDraws(5, (4, 1)), UniformDraws(5, range(7))
    for step in range(2 * BLOCK + 3):
        assert torch.equal(few(step, torch.zeros(2, 1)), many(step, torch.zeros(7, 1))[[4, 1]])
    numbers = torch.stack([UniformDraws(seed, range(7))(0, torch.zeros(7, 1)) for seed in range(5)])
    assert numbers.unique().numel() == 35  # no row of one seed is another row of the next


def test_without_a_seed_torchs_own_decides_and_is_not_reset():
    def numbers():
        torch.manual_seed(7)
        return UniformDraws(None, range(2))(0, torch.zeros(2, 1)), UniformDraws(None, range(2))(0, torch.zeros(2, 1))

    (first, second), (again, _) = numbers(), numbers()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_seed_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    UniformDraws(3, range(2))(0, torch.zeros(2, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("config", "samples"),
    [
        (GenerationConfig(), False),
        (GenerationConfig(temperature=0), False),
        (GenerationConfig(temperature=0, top_p=0.9), False),
        (GenerationConfig(seed=3), False),
        (GenerationConfig(repetition_penalty=2), False),
        (GenerationConfig(temperature=1.0), True),
        (GenerationConfig(top_k=3), True),
        (GenerationConfig(top_p=0.5), True),
        (GenerationConfig(min_p=0.5), True),
        (GenerationConfig(top_k=0, top_p=1.0, min_p=0.0), False),  # all switched off
        (GenerationConfig(do_sample=True), True),
        (GenerationConfig(do_sample=True, temperature=0), False),
        (GenerationConfig(do_sample=False, temperature=1.0), False),
    ],
)
def test_when_a_choice_samples(config, samples):
    assert config.samples is samples


def test_a_seed_is_drawn_for_several_runs_only_where_something_is_drawn():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert (GenerationConfig().seeded().seed, GenerationConfig(temperature=1.0, seed=5).seeded().seed) == (None, 5)
    assert torch.equal(torch.get_rng_state(), before)
    first = GenerationConfig(temperature=1.0).seeded()
    torch.manual_seed(7)
    assert first == GenerationConfig(temperature=1.0, seed=first.seed) == GenerationConfig(temperature=1.0).seeded()


def test_temperature_zero_is_the_most_likely_token():
    logits, seen = logits_and_seen(8)
    out = torch.empty(B, dtype=torch.long)
    Sampler(prepared(GenerationConfig(temperature=0, top_p=0.9)))(logits, seen, 0, out)
    assert torch.equal(out, logits.argmax(-1))


# --------------------------------------------------------------------------------------------------------------- errors


def test_nan_in_a_row_that_has_not_ended_is_an_error():
    for config in (GenerationConfig(), GenerationConfig(temperature=1.0)):
        sampler, out = Sampler(prepared(config)), torch.empty(B, dtype=torch.long)
        logits, seen = logits_and_seen(9)
        sampler(logits, seen, 0, out)
        broken = logits.clone()
        broken[1, 4] = torch.nan
        sampler(broken, seen, 1, out)
        assert out.max() < V
        sampler.check([2, 1, 2])
        with pytest.raises(ValueError, match=r"row.*1.*NaN"):
            sampler.check([2, 2, 1])
        sampler.row_numbers = (11, 13, 17)  # some of many rows have their own numbers
        with pytest.raises(ValueError, match=r"row.*13.*NaN"):
            sampler.check([2, 2, 1])


def test_each_row_has_one_number():
    for config in (GenerationConfig(), GenerationConfig(temperature=1.0)):
        with pytest.raises(ValueError, match=rf"2.*row_numbers.*{B}.*rows"):
            Sampler(prepared(config), (2, 5))


def test_sampling_where_every_token_is_ruled_out_is_an_error():
    sampler = Sampler(prepared(GenerationConfig(temperature=1.0, suppress_tokens=tuple(range(V)))))
    sampler(*logits_and_seen(9), 0, torch.empty(B, dtype=torch.long))
    with pytest.raises(ValueError, match="token"):
        sampler.check([1, 1, 1])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, r"temperature.*0.*-0.1"),
        ({"temperature": inf}, ValueError, r"temperature.*inf"),
        ({"temperature": "hot"}, TypeError, r"temperature.*str.*'hot'"),
        ({"top_p": 0.0}, ValueError, r"top_p.*0.*1\].*0.0"),
        ({"top_p": 1.1}, ValueError, r"top_p.*0.*1\].*1.1"),
        ({"min_p": -0.1}, ValueError, r"min_p.*\[0, 1\].*-0.1"),
        ({"min_p": 1.1}, ValueError, r"\[0, 1\].*1.1"),
        ({"repetition_penalty": 0}, ValueError, r"repetition_penalty.*1.*0"),
        ({"top_k": -1}, ValueError, r"top_k.*0.*-1"),
        ({"top_k": 2.5}, TypeError, r"top_k.*float.*2.5"),
        ({"top_k": True}, TypeError, r"top_k.*bool.*True"),
        ({"no_repeat_ngram_size": -1}, ValueError, r"no_repeat_ngram_size.*0.*-1"),
        ({"min_new_tokens": -1}, ValueError, r"min_new_tokens.*0.*-1"),
        ({"min_length": -1}, ValueError, r"min_length.*0.*-1"),
        ({"seed": -1}, ValueError, r"seed.*0.*-1"),
        ({"forced_bos_token_id": -1}, ValueError, r"forced_bos_token_id.*0.*-1"),
        ({"suppress_tokens": [3, -2]}, ValueError, r"suppress_tokens.*0.*-2"),
    ],
)
def test_a_number_out_of_its_range_is_named(given, error, message):
    with pytest.raises(error, match=message):
        GenerationConfig(**given)


@pytest.mark.parametrize("given", [{"suppress_tokens": (V,)}, {"forced_bos_token_id": V}, {"forced_eos_token_id": V}])
def test_a_token_that_the_model_does_not_have_is_refused(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))}.*{V}.*0.*{V - 1}"):
        prepared(GenerationConfig(**given))


def test_banning_the_end_is_refused():
    with pytest.raises(ValueError, match=r"suppress_tokens.*eos.*token.*3.*min_new_tokens"):
        prepared(GenerationConfig(suppress_tokens=(3,)), eos=(3,))
