"""Generating: greedy ids are those of `transformers`, rows do not disturb each other, streams and stops cut clean."""

import pytest
import torch
from toy_decoders import VOCAB, Causal, Recurrent, Seq2Seq, padded, twin

from regard.generation import loop
from regard.generation.config import GenerationConfig
from regard.generation.loop import generate, stream

GIVEN, MASK = padded(7, 3, 5)
START = torch.zeros(3, 1, dtype=torch.long)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO"


def letters(ids):
    return "".join(LETTERS[i] for i in ids)


def theirs(model, *, eos_token_ids=None, rows=slice(None), **options):
    """New ids of `transformers`, greedy: a source for an encoder, else a prompt, which is cut off."""
    out = model.generate(
        GIVEN[rows],
        attention_mask=MASK[rows].long(),
        eos_token_id=eos_token_ids,
        pad_token_id=0,
        do_sample=False,
        **options,
    )
    return out[:, 1 if model.config.is_encoder_decoder else GIVEN.shape[1] :]


def ours(model, *, rows=slice(None), **options):
    if model.config.is_encoder_decoder:
        decoder = Seq2Seq(model, GIVEN[rows], MASK[rows])
        return generate(decoder, START[rows], **options)
    return generate(Causal(model), GIVEN[rows], MASK[rows], **options)


def run(decoder=None, **options):
    given = {"ids": GIVEN, "mask": MASK, "max_new_tokens": 9} | options
    return generate(decoder or Recurrent(1), given.pop("ids"), given.pop("mask"), **given)


FAMILIES = pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])


# ----------------------------------------------------------------------------------------------------- as transformers


@FAMILIES
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_greedy_ids_are_those_of_transformers_with_and_without_an_end(family, seed):
    model = twin(family, seed)
    free = theirs(model, max_new_tokens=23)
    assert torch.equal(ours(model, max_new_tokens=23).ids, free)
    ends = [int(free[0, 2]), int(free[1, 5]), int(free[2, 9])]
    for eos in (ends[0], ends):
        made = ours(model, max_new_tokens=23, eos_token_ids=eos)
        want = theirs(model, max_new_tokens=23, eos_token_ids=eos)
        assert torch.equal(made.ids, want)
        assert "eos" in made.reasons
        for row, n, why in zip(made.ids, made.lengths, made.reasons, strict=True):
            assert (int(row[n - 1]) in (ends if eos is ends else [eos])) == (why == "eos")
            assert (row[n:] == 0).all()


@FAMILIES
def test_two_hundred_greedy_tokens_are_those_of_transformers(family):
    model = twin(family, 1)
    made = ours(model, max_new_tokens=200)
    assert made.lengths == (200, 200, 200)
    assert torch.equal(made.ids, theirs(model, max_new_tokens=200))


@FAMILIES
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GenerationConfig(no_repeat_ngram_size=2), {"no_repeat_ngram_size": 2}),
        (GenerationConfig(repetition_penalty=1.5), {"repetition_penalty": 1.5}),
        (GenerationConfig(min_new_tokens=8), {"min_new_tokens": 8}),
        (GenerationConfig(min_length=13), {"min_length": 13}),
        (GenerationConfig(forced_eos_token_id=7), {"forced_eos_token_id": 7}),
        (
            GenerationConfig(forced_bos_token_id=7, repetition_penalty=0.6),
            {"forced_bos_token_id": 7, "repetition_penalty": 0.6},
        ),
        (GenerationConfig(temperature=0, no_repeat_ngram_size=1), {"no_repeat_ngram_size": 1}),
    ],
    ids=["ngram", "repetition", "min_new", "min_length", "forced_last", "forced_first", "no token twice"],
)
def test_filters_are_those_of_transformers_on_each_row_alone(family, config, options):
    """Alone, because `transformers` penalises, repeats and counts a prompt's padding too."""
    model = twin(family, 1)
    free = theirs(model, max_new_tokens=17)
    eos = int(free[0, 4]) if config.min_new_tokens or config.min_length else None
    together = ours(model, max_new_tokens=17, eos_token_ids=eos, config=config)
    without = ours(model, max_new_tokens=17, eos_token_ids=eos)
    for row in range(3):
        cut = slice(row, row + 1)
        if family == "gpt2":
            prompt = GIVEN[row][MASK[row]][None]
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=17,
                eos_token_id=eos,
                pad_token_id=0,
                do_sample=False,
                **options,
            )
            want = out[:, prompt.shape[1] :]
        else:
            want = theirs(model, max_new_tokens=17, eos_token_ids=eos, rows=cut, **options)
        assert together.ids[row, : together.lengths[row]].tolist() == want[0].tolist()
    if not (family == "gpt2" and config.forced_bos_token_id):  # no prompt here has one token
        assert (together.lengths, together.ids.tolist()) != (without.lengths, without.ids.tolist())


# ----------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "config", [GenerationConfig(), GenerationConfig(temperature=1.3, top_p=0.9, seed=5, repetition_penalty=1.2)]
)
def test_padding_and_other_rows_change_nothing(config):
    decoder = Recurrent(2)
    together = run(decoder, eos_token_ids=[4, 9], config=config, max_new_tokens=30)
    alone = generate(decoder, GIVEN[:1], MASK[:1], max_new_tokens=30, eos_token_ids=[4, 9], config=config)
    n = together.lengths[0]
    assert together.ids[0, :n].tolist() == alone.ids[0, : alone.lengths[0]].tolist()
    unpadded = generate(decoder, GIVEN[1:2, 4:], max_new_tokens=30, eos_token_ids=[4, 9])
    if not config.samples:
        assert together.ids[1, : together.lengths[1]].tolist() == unpadded.ids[0].tolist()


def test_the_draws_of_a_row_do_not_depend_on_when_others_end():
    decoder, config = Recurrent(3), GenerationConfig(temperature=1.5, seed=11)
    free = run(decoder, config=config, max_new_tokens=40).ids
    early = int(free[0, 1])  # ends row 0 at once
    ended = run(decoder, config=config, max_new_tokens=40, eos_token_ids=early)
    assert ended.lengths[0] <= 2
    for row in (1, 2):
        n = ended.lengths[row]
        assert n > 2
        assert ended.ids[row, :n].tolist() == free[row, :n].tolist()


def test_a_seed_is_repeated_and_another_is_not():
    decoder = Recurrent(4)
    first, again, other = (run(decoder, config=GenerationConfig(temperature=1.0, seed=s)).ids for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sampled_tokens_follow_the_models_probabilities():
    decoder, many = Recurrent(5), 20_000
    config = GenerationConfig(temperature=2.0, top_k=7, seed=1)
    made = generate(decoder, torch.full((many, 1), 6), max_new_tokens=1, config=config)
    with torch.no_grad():
        logits = decoder.begin(torch.tensor([[6]]), None, length=2)[0][0] / 2
    probs = logits.where(logits >= logits.topk(7).values[-1], -torch.inf).softmax(-1)
    # Five standard deviations of a share: √(p(1 − p)/n) ≤ 0.0036.
    assert (made.ids.flatten().bincount(minlength=VOCAB) / many - probs).abs().max() < 0.018


@pytest.mark.parametrize("every", [1, 3, 16])
def test_looking_seldom_gives_the_same_ids_and_runs_a_few_steps_more(every, monkeypatch):
    decoder = Recurrent(6)
    free = run(decoder, max_new_tokens=40).ids
    ends = [int(free[row, 5]) for row in range(3)]
    want = run(decoder, max_new_tokens=40, eos_token_ids=ends)
    longest = max(want.lengths)
    assert longest <= 6

    class Elsewhere(torch.Tensor):
        """A tensor that says it is not on the CPU."""

        @property
        def is_cpu(self):
            return False

    monkeypatch.setattr(loop, "STEPS_PER_LOOK", every)
    steps = loop.TokenLoop.steps
    monkeypatch.setattr(loop.TokenLoop, "steps", lambda run: (row.as_subclass(Elsewhere) for row in steps(run)))
    decoder.steps = 0
    got = run(decoder, max_new_tokens=40, eos_token_ids=ends)
    assert (got.ids.tolist(), got.lengths, got.reasons) == (want.ids.tolist(), want.lengths, want.reasons)
    assert decoder.steps == -(-longest // every) * every - 1


def test_no_step_runs_after_the_last_token_and_room_is_asked_for_once():
    decoder = Recurrent(7)
    run(decoder, max_new_tokens=9)
    assert decoder.begun == [{"shape": (3, 7), "length": 15}]  # 7 read, and 8 of the 9 new ones
    assert decoder.steps == 8


def test_nothing_is_recorded_for_gradients_and_the_mode_is_as_before():
    decoder = Recurrent(8)
    seen = []
    step = decoder.step
    decoder.step = lambda state, tokens: seen.append(torch.is_grad_enabled()) or step(state, tokens)
    made = run(decoder, max_new_tokens=3)
    assert seen == [False, False]
    assert torch.is_grad_enabled()
    assert not made.ids.is_inference()


def test_an_interrupt_leaves_nothing_behind():
    decoder = Recurrent(9)
    before = run(decoder).ids

    def interrupt(steps):
        if steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(decoder, on_token=interrupt)
    assert torch.is_grad_enabled()
    assert torch.equal(run(decoder).ids, before)


def test_steps_are_told():
    told = []
    run(max_new_tokens=4, on_token=told.append)
    assert told == [1, 2, 3, 4]
    told.clear()
    run(max_new_tokens=4, on_token=told.append, stop_strings="never there", decode=letters)
    assert told == [1, 2, 3, 4]


# ----------------------------------------------------------------------------------------------------- text and streams


def test_texts_leave_out_the_end_token():
    decoder = Recurrent(10)
    free = run(decoder).ids
    made = run(decoder, eos_token_ids=int(free[0, 4]), decode=letters)
    n = made.lengths[0]
    assert made.reasons[0] == "eos"
    assert made.texts[0] == letters(made.ids[0, : n - 1].tolist())
    assert made.texts[1] == letters(made.ids[1, : made.lengths[1] - (made.reasons[1] == "eos")].tolist())
    assert run(decoder).texts is None


def test_a_row_that_ends_at_once_has_no_text():
    decoder = Recurrent(10)
    first = int(run(decoder).ids[0, 0])
    made = run(decoder, eos_token_ids=first, decode=letters)
    assert (made.lengths[0], made.reasons[0], made.texts[0]) == (1, "eos", "")


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_stop_string_ends_its_row_and_cuts_its_text(width):
    decoder = Recurrent(11)
    free = run(decoder, max_new_tokens=20).ids
    stop = letters(free[0, 3 : 3 + width].tolist())
    made = run(decoder, max_new_tokens=20, stop_strings=stop, decode=letters)
    whole = letters(free[0].tolist())
    assert made.reasons[0] == "stop"
    assert made.texts[0] == whole[: whole.find(stop)]
    n = made.lengths[0]
    assert n == whole.find(stop) + width
    assert made.ids[0].tolist() == free[0, :n].tolist() + [0] * (made.ids.shape[1] - n)
    for row in (1, 2):
        whole = letters(free[row].tolist())
        assert made.texts[row] == whole[: whole.find(stop) if stop in whole else None]
        assert made.reasons[row] == ("stop" if stop in whole else "length")


@pytest.mark.parametrize("config", [GenerationConfig(), GenerationConfig(temperature=1.2, seed=3)])
def test_a_stream_gives_what_generate_gives(config):
    decoder = Recurrent(12)
    eos = int(run(decoder, config=config).ids[2, 4])
    whole = run(decoder, max_new_tokens=25, eos_token_ids=eos, config=config, decode=letters)
    pieces = stream(decoder, GIVEN, MASK, decode=letters, max_new_tokens=25, eos_token_ids=eos, config=config)
    assert tuple(map("".join, zip(*pieces, strict=True))) == whole.texts == pieces.result.texts
    assert torch.equal(pieces.result.ids, whole.ids)
    assert (pieces.result.lengths, pieces.result.reasons) == (whole.lengths, whole.reasons)
    assert list(pieces) == []


def test_a_stream_shows_a_letter_as_soon_as_it_is_chosen():
    decoder = Recurrent(13)
    pieces = stream(decoder, GIVEN[:1], MASK[:1], decode=letters, max_new_tokens=5)
    assert decoder.begun == []
    for n, piece in enumerate(pieces.text()):
        assert decoder.steps == n
        assert len(piece) == 1
        assert torch.is_grad_enabled()  # between pieces the reader's code runs as it did
    assert pieces.result.texts == (letters(pieces.result.ids[0].tolist()),)


class Saying:
    """A decoder that says the given bytes, whatever the prompt."""

    def __init__(self, *rows):
        self.rows, self.at = [r.encode() if isinstance(r, str) else r for r in rows], 0

    def begin(self, ids, mask, *, length):
        self.at = 0
        return self.logits(), None

    def step(self, state, tokens):
        self.at += 1
        return self.logits()

    def logits(self):
        said = torch.tensor([row[self.at] if self.at < len(row) else 0 for row in self.rows])
        return torch.nn.functional.one_hot(said, 256).float()


def of_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_stream_of_bytes_shows_whole_characters_and_holds_back_a_stop_string():
    decoder = Saying("한글 <끝> 뒤", "🐈 <en")
    ids = torch.zeros(2, 1, dtype=torch.long)
    pieces = stream(decoder, ids, decode=of_bytes, max_new_tokens=30, eos_token_ids=0, stop_strings=["<끝>", "<end>"])
    first, second = zip(*pieces, strict=True)
    assert [piece for piece in first if piece] == ["한", "글", " "]
    assert [piece for piece in second if piece] == ["🐈", " ", "<en"]
    assert pieces.result.texts == ("한글 ", "🐈 <en")
    assert pieces.result.reasons == ("stop", "eos")


def test_what_was_held_back_comes_with_the_last_token():
    ids = torch.zeros(1, 1, dtype=torch.long)
    pieces = stream(Saying("ab한"), ids, decode=of_bytes, max_new_tokens=4, stop_strings="bx")
    assert list(pieces.text()) == ["a", "b\ufffd"]
    assert pieces.result.reasons == ("length",)
    made = generate(Saying("ab한"), ids, decode=of_bytes, max_new_tokens=4, stop_strings="\ufffd")
    assert (made.texts, made.reasons) == (("ab",), ("stop",))


def test_a_stream_left_early_leaves_nothing_behind():
    decoder = Recurrent(14)
    before = run(decoder).ids
    for _ in stream(decoder, GIVEN, MASK, decode=letters, max_new_tokens=9):
        break
    assert torch.is_grad_enabled()
    assert torch.equal(run(decoder).ids, before)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ids": GIVEN[:, :0], "mask": None}, ValueError, "prompt"),
        ({"ids": GIVEN[0], "mask": None}, ValueError, r"\(B, N\).*\(7,\)"),
        ({"ids": GIVEN[:0], "mask": None}, ValueError, r"\(0, 7\)"),
        ({"ids": GIVEN.float()}, TypeError, r"input_ids.*torch.float32"),
        ({"ids": [[1, 2]]}, TypeError, r"input_ids.*list"),
        ({"mask": MASK.long()}, ValueError, r"mask.*\(3, 7\).*torch.int64.*\(3, 7\)"),
        ({"mask": MASK[:, 1:]}, ValueError, r"torch.bool.*\(3, 6\)"),
        ({"mask": MASK.flip(1)}, ValueError, r"row.*1.*pad"),
        ({"mask": MASK & (torch.arange(7) != 5)}, ValueError, r"row.*0"),
        ({"mask": MASK & (torch.arange(3) != 2)[:, None]}, ValueError, r"row.*2"),
        ({"max_new_tokens": 0}, ValueError, r"max_new_tokens.*1.*0"),
        ({"max_new_tokens": 2.5}, TypeError, r"max_new_tokens.*float.*2.5"),
        ({"new_tokens": 3}, TypeError, "new_tokens"),
        ({"pad_token_id": -1}, ValueError, r"pad_token_id.*0.*-1"),
        ({"eos_token_ids": -1}, ValueError, r"eos.*token.*0.*-1"),
        ({"eos_token_ids": VOCAB}, ValueError, rf"eos_token_id.*{VOCAB}.*0.*{VOCAB - 1}"),
        ({"stop_strings": ""}, ValueError, r"stop.*string"),
        ({"stop_strings": "x"}, ValueError, r"stop.*decode="),
        ({"num_beams": 0}, ValueError, r"num_beams.*1.*0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, message):
    decoder = Recurrent(15)
    with pytest.raises(error, match=message):
        run(decoder, **options)
    assert decoder.steps == 0


def test_a_model_that_says_nan_is_an_error():
    decoder = Recurrent(16)
    with torch.no_grad():
        decoder.head.bias[3] = torch.nan
    for options in ({}, {"temperature": 1.0}, {"stop_strings": "?", "decode": letters}):
        with pytest.raises(ValueError, match=r"row.*0.*NaN"):
            run(decoder, **options)


def test_a_stream_has_no_result_before_its_end():
    pieces = stream(Recurrent(17), GIVEN, MASK, decode=letters, max_new_tokens=3)
    next(pieces)
    with pytest.raises(RuntimeError, match="iterate"):
        _ = pieces.result


def test_text_is_for_one_row():
    pieces = stream(Recurrent(17), GIVEN, MASK, decode=letters, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"text\(\).*3"):
        pieces.text()


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [GenerationConfig(), GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=4)]
)
@pytest.mark.parametrize("beams", [1, 4])
def test_a_gpu_gives_the_ids_of_the_cpu(config, beams):
    decoder = Recurrent(18).double()
    eos = run(decoder, max_new_tokens=60).ids[:, 19].tolist()
    here = run(decoder, max_new_tokens=60, eos_token_ids=eos, config=config, num_beams=beams)
    there = run(
        decoder.cuda(),
        ids=GIVEN.cuda(),
        mask=MASK.cuda(),
        max_new_tokens=60,
        eos_token_ids=eos,
        config=config,
        num_beams=beams,
    )
    assert there.ids.is_cuda
    assert (there.ids.tolist(), there.lengths, there.reasons) == (here.ids.tolist(), here.lengths, here.reasons)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_gpu_is_not_waited_for_while_tokens_are_chosen():
    decoder, ids = Recurrent(19).cuda(), GIVEN.cuda()
    for config in (GenerationConfig(), GenerationConfig(temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=3)):
        generate(decoder, ids, max_new_tokens=4, eos_token_ids=3, config=config)
        modes = []

        def told(steps, modes=modes):
            # From the first step on, until the first look, anything that waits raises.
            torch.cuda.set_sync_debug_mode("error" if steps < loop.STEPS_PER_LOOK else "default")
            modes.append(steps)

        try:
            generate(decoder, ids, max_new_tokens=20, eos_token_ids=3, config=config, on_token=told)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(modes) >= loop.STEPS_PER_LOOK


@pytest.mark.gpu
def test_a_seed_is_repeated_on_a_gpu():
    decoder = Recurrent(20).cuda()
    options = {"ids": GIVEN.cuda(), "mask": MASK.cuda(), "max_new_tokens": 300}
    first, again, other = (
        run(decoder, **options, config=GenerationConfig(temperature=1.0, seed=s)).ids for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
