"""Positions against their formulas written as loops, and against `transformers` where it has the same thing."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom import modeling_bloom
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.t5.modeling_t5 import T5Attention

import regard.rotary
from regard.masks.mask import indices
from regard.positions import (
    T5,
    Bias,
    DynamicNTK,
    Learned,
    LinearScaling,
    Llama3,
    LongRope,
    Rotary,
    Shaw,
    Swin,
    Yarn,
    alibi,
    as_bias,
    dense,
    sinusoidal,
    sinusoidal_2d,
)

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps


def full(bias: Bias, batch: int, heads: int, nq: int, nk: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The bias evaluated as a backend evaluates it, (B, H, Nq, Nk)."""
    bias.fit(batch, heads, nq, nk)
    term = bias.bind(nq, nk, CPU, dtype)
    return term(*indices(batch, heads, torch.arange(nq), torch.arange(nk), CPU)).expand(batch, heads, nq, nk)


# --------------------------------------------------------------------------------------------------- added to the input


def test_sinusoidal_has_sines_in_even_and_cosines_in_odd_columns():
    table = sinusoidal(7, 10, base=31.0, dtype=torch.float64)
    assert table.shape == (7, 10)
    for n, c in product(range(7), range(10)):
        angle = n / 31.0 ** ((c - c % 2) / 10)
        expected = math.cos(angle) if c % 2 else math.sin(angle)
        assert abs(table[n, c].item() - expected) <= 8 * EPS64


def test_sinusoidal_is_rounded_from_fp64():
    # Around position 5000 angles computed in fp32 would be off by 1e-5.
    assert torch.equal(sinusoidal(5003, 6), sinusoidal(5003, 6, dtype=torch.float64).float())
    assert sinusoidal(3, 6, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_sinusoidal_2d_gives_each_patch_its_row_and_its_column():
    table = sinusoidal_2d(3, 5, 28, base=100.0)
    rows, columns = sinusoidal(3, 14, base=100.0), sinusoidal(5, 14, base=100.0)
    assert table.shape == (15, 28)
    for y, x in product(range(3), range(5)):
        assert torch.equal(table[5 * y + x], torch.cat([rows[y], columns[x]]))


def test_learned_adds_its_rows_and_only_they_get_gradient():
    learned = Learned(11, 7)
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(learned(x), x + learned.table[:5])
    assert torch.equal(learned(x, start=6), x + learned.table[6:11])
    learned(x, start=4).sum().backward()
    expected = torch.zeros(11, 7)
    expected[4:9] = 6.0  # 2·3 leading rows each add 1
    assert torch.equal(learned.table.grad, expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sinusoidal(3, 5), ValueError, r"d.*5"),
        (lambda: sinusoidal(0, 4), ValueError, r"n.*1.*0"),
        (lambda: sinusoidal(3.0, 4), TypeError, r"n.*float.*3.0"),
        (lambda: sinusoidal(True, 4), TypeError, r"n.*bool"),
        (lambda: sinusoidal_2d(3, 5, 6), ValueError, r"d.*4.*6"),
        (lambda: sinusoidal_2d(3, 0, 8), ValueError, r"width.*1.*0"),
        (lambda: sinusoidal_2d(-1, 5, 8), ValueError, r"height.*1.*-1"),
        (lambda: Learned(0, 5), ValueError, r"n.*1.*0"),
        (lambda: Learned(5, 0), ValueError, r"d.*1.*0"),
        (lambda: Learned(5, 3)(torch.zeros(7, 3)), ValueError, r"5.*7"),
        (lambda: Learned(5, 3)(torch.zeros(2, 3), start=4), ValueError, r"5.*2.*4"),
        (lambda: Learned(5, 3)(torch.zeros(2, 3), start=-1), ValueError, r"start.*0.*-1"),
        (lambda: Learned(5, 3)(torch.zeros(2, 1)), ValueError, r"x.*\(…, N, 3\).*shape.*\(2, 1\)"),
    ],
)
def test_input_positions_refuse_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --------------------------------------------------------------------------------------------------------------- rotary


def turn_by_loop(x, positions, base, pairs):
    """x (N, D) turned pair by pair in fp64, straight from the paper's equation."""
    out = x.double().clone()
    for n, (p, (a, b)) in product(range(x.shape[0]), enumerate(pairs)):
        angle = positions[n] / base ** (p / len(pairs))
        out[n, a] = x[n, a].double() * math.cos(angle) - x[n, b].double() * math.sin(angle)
        out[n, b] = x[n, b].double() * math.cos(angle) + x[n, a].double() * math.sin(angle)
    return out


def assert_same(ours, theirs):
    """Equal but for the last bits: both compute in fp32, in another order at most."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * EPS * float(theirs.abs().max()))


HALF = [(p, p + 3) for p in range(3)]
INTERLEAVED = [(2 * p, 2 * p + 1) for p in range(3)]


@pytest.mark.parametrize(("layout", "pairs"), [("half", HALF), ("interleaved", INTERLEAVED)])
@pytest.mark.parametrize("rotated", [None, 6])
def test_turn_is_the_rotation_of_the_paper(layout, pairs, rotated):
    rotary = Rotary(6 if rotated is None else 11, base=97.0, layout=layout, rotated=rotated)
    x, positions = torch.randn(5, rotary.dim, dtype=torch.float64), torch.tensor([3, 0, 41, -2, 7])
    truth = turn_by_loop(x, positions.tolist(), 97.0, pairs)
    torch.testing.assert_close(rotary.turn(x, positions), truth, rtol=0, atol=100 * EPS64)
    assert torch.equal(rotary.turn(x, positions)[:, 6:], x[:, 6:])


def test_half_layout_is_that_of_llama_in_transformers():
    config = LlamaConfig(hidden_size=3 * 22, num_attention_heads=3, rope_parameters={"rope_theta": 5000.0})
    x, positions = torch.randn(2, 3, 41, 22), torch.randint(0, 2000, (2, 41))
    theirs, _ = llama.apply_rotary_pos_emb(x, x, *llama.LlamaRotaryEmbedding(config)(x, positions))
    rotary = Rotary(22, base=5000.0)
    assert_same(rotary.turn(x, positions), theirs)


def test_interleaved_layout_is_that_of_gptj_in_transformers():
    x, positions = torch.randn(2, 3, 41, 22), torch.arange(41)
    sin, cos = gptj.create_sinusoidal_positions(41, 22)[None].chunk(2, -1)  # (1, N, R/2) each
    theirs = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)  # GPT-J has (B, N, H, D)
    rotary = Rotary(22, layout="interleaved")
    assert_same(rotary.turn(x, positions), theirs)


def test_partial_turning_is_that_of_gpt_neox_in_transformers():
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=3 * 40, num_attention_heads=3, rope_parameters=parameters)
    x, positions = torch.randn(2, 3, 17, 40), torch.randint(0, 2000, (2, 17))
    theirs, _ = gpt_neox.apply_rotary_pos_emb(x, x, *gpt_neox.GPTNeoXRotaryEmbedding(config)(x, positions))
    rotary = Rotary(40, rotated=10)
    assert_same(rotary.turn(x, positions), theirs)


def in_transformers(kind, dim=22, longest=64, **parameters):
    parameters = {"rope_type": kind, "rope_theta": 500000.0, **parameters}
    return LlamaConfig(
        hidden_size=3 * dim, num_attention_heads=3, max_position_embeddings=longest, rope_parameters=parameters
    )


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0 + 0.1 * p for p in range(11)], [1.0 + 0.7 * p for p in range(11)]
SETS = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": (LinearScaling(3.7), "linear", {"factor": 3.7}),
    "dynamic": (DynamicNTK(1.7, 64), "dynamic", {"factor": 1.7}),
    "yarn": (Yarn(4.0, 64), "yarn", YARN),
    "yarn, long training": (
        Yarn(40.0, 4096),
        "yarn",
        {"factor": 40.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, ramp of no length": (Yarn(4.0, 6), "yarn", {**YARN, "original_max_position_embeddings": 6}),
    "yarn, ramp outside": (Yarn(4.0, 3), "yarn", {**YARN, "original_max_position_embeddings": 3}),
    "yarn, shrinking": (Yarn(0.5, 64), "yarn", {**YARN, "factor": 0.5}),
    "yarn, attention factor": (Yarn(4.0, 64, attention_factor=0.3), "yarn", {**YARN, "attention_factor": 0.3}),
    "yarn, betas": (Yarn(4.0, 64, beta_fast=20, beta_slow=2), "yarn", {**YARN, "beta_fast": 20, "beta_slow": 2}),
    "yarn, mscales": (
        Yarn(4.0, 64, mscale=0.7, mscale_all_dim=0.4, truncate=False),
        "yarn",
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
    ),
    "llama3": (
        Llama3(8.0, low=1.0, high=4.0, original=512),
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "longrope": (LongRope(SHORT, LONG, 64, factor=4.0), "longrope", {**SETS, "factor": 4.0}),
    "longrope, shrinking": (LongRope(SHORT, LONG, 64, factor=0.5), "longrope", {**SETS, "factor": 0.5}),
    "longrope, attention factor": (
        LongRope(SHORT, LONG, 64, attention_factor=1.3),
        "longrope",
        {**SETS, "attention_factor": 1.3},
    ),
}


@pytest.mark.parametrize("length", [1, 64, 65, 211])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_and_magnitude_are_those_of_transformers(name, length):
    scaling, kind, parameters = SCALINGS[name]
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](in_transformers(kind, **parameters), "cpu", seq_len=length)
    rotary = Rotary(22, base=500000.0, scaling=scaling)
    torch.testing.assert_close(rotary.frequencies(length), theirs, rtol=4 * EPS, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude, rel=4 * EPS64, abs=0)


@pytest.mark.parametrize("name", ["dynamic", "yarn", "llama3"])
def test_scaling_counts_only_the_columns_that_turn(name):
    scaling, kind, parameters = SCALINGS[name]
    config = in_transformers(kind, dim=40, **parameters, partial_rotary_factor=0.25)
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=211)
    ours = Rotary(40, base=500000.0, rotated=10, scaling=scaling).frequencies(211)
    torch.testing.assert_close(ours, theirs, rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("last", [10, 63, 64, 200])
@pytest.mark.parametrize("name", ["dynamic", "yarn, mscales", "longrope"])
def test_turn_takes_the_length_from_the_largest_position_as_transformers_does(name, last):
    scaling, kind, parameters = SCALINGS[name]
    x = torch.randn(2, 3, 5, 22)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 2, last, 5, 9]])  # the largest is in one batch row alone
    module = llama.LlamaRotaryEmbedding(in_transformers(kind, **parameters))
    theirs, _ = llama.apply_rotary_pos_emb(x, x, *module(x, positions))
    rotary = Rotary(22, base=500000.0, scaling=scaling)
    assert_same(rotary.turn(x, positions), theirs)


def test_scores_of_turned_vectors_depend_on_the_distance_alone():
    q, k = torch.randn(2, 13, 10, dtype=torch.float64).unbind()
    rotary, here = Rotary(10, rotated=6), torch.arange(13)
    near = rotary.turn(q, here) @ rotary.turn(k, here).mT
    far = rotary.turn(q, here + 1000) @ rotary.turn(k, here + 1000).mT
    torch.testing.assert_close(near, far, rtol=0, atol=1e-11)


def test_positions_may_differ_by_batch_row():
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]], dtype=torch.int32)
    expected = torch.stack([rotary.turn(x[b], positions[b]) for b in range(2)])
    assert torch.equal(rotary.turn(x, positions), expected)
    assert torch.equal(rotary.turn(x[:, 0], positions), expected[:, 0])
    assert torch.equal(rotary.turn(x, positions[1:]), rotary.turn(x, positions[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_turned_in_fp32_and_rounded_once(dtype):
    rotary, x = Rotary(6, rotated=4), torch.randn(5, 6).to(dtype)
    positions = torch.arange(5) + 700  # in bf16 neither the position nor the angle would be right
    assert torch.equal(rotary.turn(x, positions), rotary.turn(x.float(), positions).to(dtype))


def test_turning_back_undoes_turning_and_gradient_turns_back():
    rotary, positions = Rotary(6, layout="interleaved"), torch.tensor([3, 0, 11])
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    turned = rotary.turn(x, positions)
    torch.testing.assert_close(rotary.turn(turned, -positions), x, rtol=0, atol=20 * EPS64)
    direction = torch.randn(3, 6, dtype=torch.float64)
    (turned * direction).sum().backward()
    torch.testing.assert_close(x.grad, rotary.turn(direction, -positions), rtol=0, atol=20 * EPS64)


@pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 8)])
def test_no_positions_give_no_vectors(scaling):
    empty = Rotary(6, scaling=scaling).turn(torch.zeros(2, 0, 6), torch.zeros(0, dtype=torch.long))
    assert empty.shape == (2, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rotary", [Rotary(6), Rotary(11, rotated=6, scaling=Yarn(4.0, 8)), Rotary(6, layout="interleaved")]
)
def test_angles_made_once_turn_as_their_positions_do(rotary, dtype):
    x = torch.randn(2, 3, 5, rotary.dim).to(dtype)
    for positions in (torch.arange(5) + 7, torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])):
        angles = rotary.angles(positions, torch.promote_types(dtype, torch.float32))
        assert torch.equal(rotary.turn(x, angles), rotary.turn(x, positions))
        if positions.ndim == 2:
            assert torch.equal(rotary.turn(x[:, 0], angles), rotary.turn(x[:, 0], positions))


@pytest.mark.parametrize("rotary", [Rotary(6), Rotary(11, rotated=6), Rotary(6, layout="interleaved")])
@pytest.mark.parametrize("positions", [torch.arange(17) + 5, torch.arange(34).view(2, 17)], ids=["shared", "own"])
@pytest.mark.parametrize("numbers", [1, 100])
@torch.no_grad()
def test_turning_in_pieces_gives_the_same_bits(rotary, positions, numbers, monkeypatch):
    x = torch.randn(2, 17, 3, rotary.dim, dtype=torch.bfloat16).transpose(1, 2)  # as heads are split off
    at_once, turned, seen = rotary.turn(x, positions), Rotary._turned, []
    monkeypatch.setattr(Rotary, "_turned", lambda own, *parts: seen.append(parts[0].shape[2]) or turned(own, *parts))
    monkeypatch.setattr(regard.rotary, "TURNED", {"cpu": numbers})
    assert torch.equal(rotary.turn(x, positions), at_once)
    most = max(1, numbers // (6 * rotary.dim))
    assert seen == [most] * (17 // most) + [17 % most] * (17 % most > 0)
    with torch.enable_grad():
        rotary.turn(x, positions)
    assert seen[-1] == 17


def test_angles_are_cosines_and_sines_of_position_times_frequency_and_the_magnitude():
    rotary, positions = Rotary(6, base=97.0, scaling=Yarn(4.0, 8)), torch.tensor([[3, 0], [41, 7]])
    cos, sin = rotary.angles(positions, torch.float64)
    frequencies = rotary.frequencies(dtype=torch.float64)
    for b, n, p in product(range(2), range(2), range(3)):
        angle = positions[b, n] * frequencies[p]
        assert float(cos[b, n, p]) == pytest.approx(rotary.magnitude * math.cos(angle), abs=4 * EPS64)
        assert float(sin[b, n, p]) == pytest.approx(rotary.magnitude * math.sin(angle), abs=4 * EPS64)
    assert cos.shape == sin.shape == (2, 2, 3)
    assert rotary.angles(positions).cos.dtype == torch.float32


def test_angles_of_one_text_turn_a_batch():
    rotary, x = Rotary(8), torch.randn(2, 3, 5, 8)
    assert torch.equal(rotary.turn(x, rotary.angles(torch.arange(5)[None])), rotary.turn(x, torch.arange(5)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_length_of_a_text_is_counted_beyond_a_narrow_integer(dtype):
    last = min(torch.iinfo(dtype).max, 70_000)
    positions = torch.arange(last - 4, last + 1)
    rotary = Rotary(8, scaling=DynamicNTK(2.0, 16))
    for ours, wide in zip(rotary.angles(positions.to(dtype)), rotary.angles(positions), strict=True):
        assert torch.equal(ours, wide)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], (torch.ones(5, 3), torch.zeros(5, 3)), None])
def test_neither_positions_nor_angles_is_refused(positions):
    message = rf"positions.*torch\.arange\(N\).*{type(positions).__name__}"
    with pytest.raises(TypeError, match=message):
        Rotary(6).turn(torch.zeros(5, 6), positions)


def test_rotary_is_a_value():
    make = lambda: Rotary(22, scaling=LongRope(SHORT, LONG, 64, factor=4.0))  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
    assert Rotary(22) != Rotary(22, base=500.0)
    assert repr(Rotary(8, scaling=LinearScaling(2.0))) == (
        "Rotary(dim=8, base=10000.0, layout='half', rotated=None, scaling=LinearScaling(factor=2.0))"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rotary(7), ValueError, r"dim.*7"),
        (lambda: Rotary(0), ValueError, r"dim.*2.*0"),
        (lambda: Rotary(8.0), TypeError, r"dim.*float"),
        (lambda: Rotary(8, rotated=10), ValueError, r"rotated.*8.*10"),
        (lambda: Rotary(8, rotated=3), ValueError, r"rotated.*8.*3"),
        (lambda: Rotary(8, rotated=0), ValueError, r"rotated.*2.*0"),
        (lambda: Rotary(8, base=1.0), ValueError, r"base.*1.*1.0"),
        (lambda: Rotary(8, base=math.nan), ValueError, r"base.*1.*nan"),
        (lambda: Rotary(8, layout="pairs"), ValueError, r"layout.*'half'.*'interleaved'.*'pairs'"),
        (lambda: Rotary(8, scaling=2.0), TypeError, r"scaling.*2.0"),
        (lambda: Rotary(2, scaling=DynamicNTK(2.0, 8)), ValueError, r"4.*2"),
        (
            lambda: Rotary(8, scaling=LongRope([1.0] * 4, [1.0] * 3, 8, factor=2.0)),
            ValueError,
            r"LongRope.*4.*8.*4.*3",
        ),
        (lambda: LinearScaling(0.0), ValueError, r"factor.*0.*0.0"),
        (lambda: LinearScaling(math.nan), ValueError, r"factor.*0.*nan"),
        (lambda: DynamicNTK(2.0, 0), ValueError, r"original.*1.*0"),
        (lambda: DynamicNTK(-2.0, 8), ValueError, r"factor.*0.*-2.0"),
        (lambda: Yarn(2.0, 8, beta_slow=0.0), ValueError, r"beta_slow.*0.*0.0"),
        (lambda: Yarn(2.0, 8, beta_slow=32.0), ValueError, r"beta_slow.*beta_fast.*32.0"),
        (lambda: Yarn(2.0, 8.0), TypeError, r"original.*float"),
        (lambda: Yarn(2.0, 8, mscale=1.0), ValueError, r"mscale.*mscale_all_dim.*1.0.*None"),
        (
            lambda: Yarn(2.0, 8, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
            ValueError,
            r"attention_factor.*mscale",
        ),
        (lambda: Llama3(8.0, 4.0, 4.0, 64), ValueError, r"low.*low=4.0.*high=4.0"),
        (lambda: Llama3(8.0, 1.0, 4.0, 0), ValueError, r"original.*1.*0"),
        (lambda: LongRope([1.0], [1.0], 8), ValueError, r"factor=None.*attention_factor=None"),
        (
            lambda: LongRope([1.0], [1.0], 8, factor=2.0, attention_factor=1.0),
            ValueError,
            r"factor=2.0.*attention_factor=1.0",
        ),
        (lambda: LongRope([1.0], [0.0], 8, factor=2.0), ValueError, r"long.*0.0"),
        (lambda: LongRope([1.0], [1.0], 1, factor=2.0), ValueError, r"original.*2.*1"),
        (lambda: LongRope([1.0], [1.0], 8, factor=0.0), ValueError, r"factor.*attention_factor.*0.0"),
    ],
)
def test_rotary_refuses_bad_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("x", "positions", "error", "message"),
    [
        (
            torch.zeros(3, 6).long(),
            torch.arange(3),
            TypeError,
            r"x.*torch.int64",
        ),
        (np.zeros((3, 6)), torch.arange(3), TypeError, r"x.*float64"),
        (torch.zeros(3, 8), torch.arange(3), ValueError, r"x.*\(…, N, 6\).*\(3, 8\)"),
        (torch.zeros(3, 6), torch.arange(3.0), TypeError, r"torch.arange.*torch.float32"),
        (torch.zeros(3, 6), torch.ones(3).bool(), TypeError, r"torch.bool"),
        (torch.zeros(3, 6), [0, 1, 2], TypeError, "list"),
        (torch.zeros(3, 6), torch.arange(4), ValueError, r"\(4,\).*\(3, 6\)"),
        (torch.zeros(3, 6), torch.zeros(1, 3).long(), ValueError, r"\(1, 3\).*\(3, 6\)"),
        (torch.zeros(5, 2, 3, 6), torch.zeros(2, 3).long(), ValueError, r"\(N,\).*\(B, N\)"),
        (torch.zeros(2, 5, 7, 3, 6), torch.zeros(2, 3).long(), ValueError, r"\(N,\).*\(B, N\)"),
    ],
)
def test_turn_refuses_what_does_not_fit(x, positions, error, message):
    with pytest.raises(error, match=message):
        Rotary(6).turn(x, positions)


# -------------------------------------------------------------------------------------------------- biases, all of them


def every_bias():
    """One of each kind, for 2 batch rows, 3 heads and 10 = 2·5 positions."""
    q = torch.randn(2, 3, 10, 7)
    return {
        "alibi": alibi(3),
        "alibi, placed": alibi(3, offset=[4, -2]),
        "alibi, one head": alibi(1),
        "T5": T5(3, buckets=8, max_distance=5).bias(q, 0.5),
        "T5, one head": T5(1, buckets=8, max_distance=5, bidirectional=False).bias(q, 0.5),
        "Shaw": Shaw(7, 2).bias(q, 0.5),
        "Shaw, placed": Shaw(7, 2, num_heads=3).bias(q, 0.5).placed([[4, 1, 0], [-2, 3, 2]]),
        "Swin": Swin((2, 5), 3).bias(q, 0.5),
        "dense": dense(torch.randn(3, 10, 10)),
    }


NAMES = list(every_bias())


@pytest.mark.parametrize("name", NAMES)
def test_bound_bias_runs_on_single_indices_under_vmap_as_in_flex_attention(name):
    bias = every_bias()[name]
    term = bias.bind(10, 10, CPU, torch.float32)
    for axis in (3, 2, 1, 0):  # keys innermost
        term = torch.vmap(term, in_dims=tuple(0 if a == axis else None for a in range(4)))
    cells = term(torch.arange(2), torch.arange(3), torch.arange(10), torch.arange(10))
    assert torch.equal(cells, full(bias, 2, 3, 10, 10, torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_bias_on_a_tile_is_that_part_of_the_whole(name):
    bias = every_bias()[name]
    term = bias.bind(10, 10, CPU, torch.float32)
    tile = term(*indices(2, 3, torch.arange(3, 7), torch.arange(6, 9), CPU)).expand(2, 3, 4, 3)
    assert torch.equal(tile, full(bias, 2, 3, 10, 10, torch.float32)[:, :, 3:7, 6:9])


@pytest.mark.parametrize("name", NAMES)
def test_dense_has_the_leading_axes_over_which_the_bias_varies(name):
    bias = every_bias()[name]
    batch, heads = bias.leading
    lead = (batch, heads) if batch * heads > 1 else ()
    assert bias.dense(10).shape == (*lead, 10, 10)
    assert torch.equal(bias.dense(10).expand(2, 3, 10, 10), full(bias, 2, 3, 10, 10, torch.float32))


@pytest.mark.parametrize("name", NAMES[:-1])  # a dense bias keeps its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_have_the_dtype_of_the_scores(name, dtype):
    assert every_bias()[name].dense(10, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_is_its_own_bias_and_equals_itself_with_its_own_tensors(name):
    bias = every_bias()[name]
    assert bias.bias(torch.zeros(1), 1.0) is bias
    again = bias.with_tensors(tuple(t.clone() for t in bias.tensors))
    assert again == bias
    assert hash(again) == hash(bias)
    assert again.form == bias.form
    assert bias.with_tensors(tuple(t + 1 for t in bias.tensors)) != bias


def test_biases_print():
    assert repr(alibi(3, offset=[4, -2])) == "alibi(<3 slopes>, offset=[[4], [-2]])"
    assert repr(T5(3).bias(torch.zeros(1), 1.0).placed(5)) == "Relative(<1×3×1×257 torch.float32>, offset=5)"
    assert repr(Swin((2, 5), 3).bias(torch.zeros(1), 1.0)) == "SwinBias(2×5 patches, 3 heads)"
    assert repr(dense(torch.zeros(2, 1, 3, 5))) == "dense(<2×3×5 torch.float32>)"


def test_numbers_are_read_as_a_dense_bias():
    cells = torch.randn(3, 7, 5)
    assert torch.equal(full(as_bias(cells, (2, 3, 7, 5)), 2, 3, 7, 5, torch.float32), cells.expand(2, 3, 7, 5))
    assert torch.equal(as_bias(cells[0].numpy(), (7, 5)).dense(7, 5), cells[0])
    assert as_bias(None, (7, 5)) is None
    mine = alibi(3)
    assert as_bias(mine, (3, 7, 5)) is mine


# ---------------------------------------------------------------------------------------------------------------- ALiBi


def bloom_slopes(heads):
    """What transformers computes for BLOOM; its name there is private and not in every release."""
    slopes = getattr(modeling_bloom, "_get_alibi_slopes", None)
    if slopes is None:
        pytest.skip("this transformers has no _get_alibi_slopes to compare with")
    return slopes(heads, CPU)


@pytest.mark.parametrize("heads", [*range(1, 18), 31, 32, 40, 112])
def test_slopes_are_those_of_bloom_in_transformers(heads):
    slopes = -alibi(heads).dense(1, 2)[..., 0, 0]  # the distance is 1
    torch.testing.assert_close(slopes.reshape(-1), bloom_slopes(heads), rtol=16 * EPS, atol=0)


@pytest.mark.parametrize(("nq", "nk"), [(5, 11), (11, 5), (7, 7)])
@pytest.mark.parametrize("offset", [None, 3, [2, -4]])
def test_alibi_is_minus_slope_times_distance(nq, nk, offset):
    cells = full(alibi(3, offset=offset, slopes=[0.5, 2.0, 0.25]), 2, 3, nq, nk)
    for b, h, i, j in product(range(2), range(3), range(nq), range(nk)):
        start = nk - nq if offset is None else offset[b] if isinstance(offset, list) else offset
        assert cells[b, h, i, j] == -[0.5, 2.0, 0.25][h] * abs(i + start - j)


def test_alibi_is_blooms_up_to_a_number_per_row_where_a_causal_mask_shows_it():
    ours = alibi(4, offset=0).dense(7)[0]
    bloom = bloom_slopes(4)[:, None, None] * torch.arange(7)  # grows with the key: (H, 1, N)
    for i in range(7):
        assert torch.equal((ours - bloom)[:, i, : i + 1], (ours - bloom)[:, i, :1].expand(-1, i + 1))


def test_own_slopes_get_gradient():
    slopes = torch.tensor([1.0, 2.0], requires_grad=True)
    alibi(2, slopes=slopes).dense(1, 4).sum().backward()
    assert slopes.grad.tolist() == [-6.0, -6.0]  # −(3 + 2 + 1 + 0)


# ------------------------------------------------------------------------------------------------------------------- T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "far"),
    [(32, 128), (32, 17), (4, 3), (4, 300), (6, 11), (8, 50), (64, 128), (128, 91), (256, 1000), (20, 160), (48, 81)],
)
def test_buckets_are_those_of_t5_in_transformers_at_every_distance(buckets, far, bidirectional):
    # 20, 160 both ways and 48, 81 one way have distances at a bucket's edge, where fp32 and fp64 decide differently.
    check_buckets(buckets, far, bidirectional)


def test_an_odd_number_of_buckets_works_one_way():
    check_buckets(7, 40, False)


def check_buckets(buckets, far, bidirectional):
    t5 = T5(1, buckets=buckets, max_distance=far, bidirectional=bidirectional)
    with torch.no_grad():
        t5.table.copy_(torch.arange(buckets)[:, None])  # the term is the number of the bucket
    ours = t5.bias(torch.zeros(1), 1.0).placed(1100).dense(1, 2201)[0]
    theirs = T5Attention._relative_position_bucket(torch.arange(-1100, 1101), bidirectional, buckets, far)
    assert torch.equal(ours.long(), theirs)


@pytest.mark.parametrize(("nq", "nk"), [(5, 11), (11, 5)])
def test_t5_reads_its_table_by_head_and_bucket_and_gradients_count_the_readings(nq, nk):
    t5 = T5(3, buckets=8, max_distance=6).double()
    cells = full(t5.bias(torch.zeros(1), 1.0), 2, 3, nq, nk)
    distance = torch.arange(nk) - (torch.arange(nq) + nk - nq)[:, None]
    bucket = T5Attention._relative_position_bucket(distance, True, 8, 6)  # (Nq, Nk)
    assert torch.equal(cells, t5.table[bucket].permute(2, 0, 1).expand(2, 3, nq, nk))
    cells.sum().backward()
    readings = 2.0 * torch.bincount(bucket.flatten(), minlength=8)
    assert torch.equal(t5.table.grad, readings[:, None].expand(8, 3).double())


# ----------------------------------------------------------------------------------------------------------------- Shaw


def shaw_by_loop(q, table, scale, offsets, nk):
    """The paper's key term, one number at a time: q (B, H, Nq, D), table (H, 2k + 1, D)."""
    far = table.shape[1] // 2
    rows = []
    for b, h, i in product(*(range(n) for n in q.shape[:3])):
        distances = [max(-far, min(far, j - i - offsets[b])) for j in range(nk)]
        rows.append(torch.stack([q[b, h, i] @ table[h, d + far] * scale for d in distances]))
    return torch.stack(rows).view(*q.shape[:3], nk)


@pytest.mark.pairwise
@pytest.mark.parametrize(("nq", "nk"), [(5, 11), (11, 5)])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("offset", [None, [2, -4]])
def test_shaw_is_the_query_times_the_vector_of_the_distance(nq, nk, heads, offset):
    shaw = Shaw(7, 2, num_heads=heads).double()
    q = torch.randn(2, 3, nq, 7, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(2, 3, nq, nk, dtype=torch.float64)

    def judge(cells):
        return cells, *torch.autograd.grad((cells * direction).sum(), (q, shaw.table))

    bias = shaw.bias(q, 0.3) if offset is None else shaw.bias(q, 0.3).placed(offset)
    table = shaw.table.expand(3, 5, 7)
    truth = judge(shaw_by_loop(q, table, 0.3, [nk - nq] * 2 if offset is None else offset, nk))
    for ours, expected in zip(judge(full(bias, 2, 3, nq, nk)), truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=100 * EPS64)


def test_shaw_takes_queries_without_heads_or_batch():
    shaw, q = Shaw(7, 2), torch.randn(2, 5, 7)
    assert shaw.bias(q, 0.3) == shaw.bias(q[:, None], 0.3)
    assert shaw.bias(q[0], 0.3) == shaw.bias(q[None, None, 0], 0.3)
    assert shaw.bias(q.view(1, 2, 1, 5, 7), 0.3) == shaw.bias(q[:, None], 0.3)


def test_shaw_holds_a_term_per_query_and_distance_not_per_key():
    bias = Shaw(7, 2).bias(torch.randn(1, 3, 1009, 7), 0.3)
    assert [t.numel() for t in bias.tensors] == [3 * 1009 * 5]


def test_shaw_terms_are_fp32_for_half_precision_queries_also_under_autocast():
    shaw, q = Shaw(7, 2), torch.randn(2, 3, 5, 7).bfloat16()
    exact = shaw.bias(q.float(), 0.3)
    assert shaw.bias(q, 0.3) == exact
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert shaw.bias(q, 0.3) == exact


# ----------------------------------------------------------------------------------------------------------------- Swin


@pytest.mark.parametrize("window", [(2, 5), (5, 2), (1, 7), (3, 3)])
def test_swin_reads_its_table_as_transformers_does(window):
    swin, theirs = Swin(window, 3), SwinRelativePositionBias(3, window)
    with torch.no_grad():
        theirs.relative_position_bias_table.copy_(swin.table)
    patches, bias = window[0] * window[1], swin.bias(torch.zeros(1), 1.0)
    assert torch.equal(bias.dense(patches), theirs())
    assert torch.equal(bias.everywhere(patches, patches, CPU, torch.float32), theirs())


def test_swin_gradients_count_the_readings():
    swin = Swin((2, 5), 3).double()
    full(swin.bias(torch.zeros(1), 1.0), 2, 3, 10, 10).sum().backward()
    readings = [2.0 * (2 - abs(y)) * (5 - abs(x)) for y in range(-1, 2) for x in range(-4, 5)]
    assert torch.equal(swin.table.grad, torch.tensor(readings).double()[:, None].expand(27, 3))


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: alibi(0), ValueError, r"heads.*1.*0"),
        (lambda: alibi(3, slopes=[1.0, 2.0]), ValueError, r"slopes.*\(3,\).*shape.*\(2,\)"),
        (lambda: alibi(2, slopes=[1, 2]), TypeError, r"slopes.*torch.int64"),
        (lambda: alibi(2, offset=1.5), TypeError, r"offset.*float"),
        (lambda: T5(0), ValueError, r"heads.*1.*0"),
        (lambda: T5(3, buckets=2), ValueError, r"buckets.*4.*2"),
        (lambda: T5(3, buckets=1, bidirectional=False), ValueError, r"buckets.*2.*1"),
        (lambda: T5(3, buckets=7), ValueError, r"buckets.*bidirectional.*7"),
        (lambda: T5(3, max_distance=0), ValueError, r"max_distance.*1.*0"),
        (lambda: T5(3, max_distance=16, bidirectional=False), ValueError, r"max_distance.*16"),
        (lambda: T5(3, max_distance=8), ValueError, r"max_distance.*8"),
        (lambda: Shaw(7, 0), ValueError, r"max_distance.*1.*0"),
        (lambda: Shaw(0, 2), ValueError, r"head_dim.*1.*0"),
        (lambda: Shaw(7, 2, num_heads=0), ValueError, r"heads.*1.*0"),
        (lambda: Shaw(7, 2).bias(torch.zeros(5, 6), 1.0), ValueError, r"q.*6.*Shaw.*7"),
        (
            lambda: Shaw(7, 2, num_heads=3).bias(torch.zeros(2, 4, 5, 7), 1.0),
            ValueError,
            r"q.*4.*heads.*Shaw.*3",
        ),
        (lambda: Swin((0, 5), 3), ValueError, r"height.*1.*0"),
        (lambda: Swin((2, -5), 3), ValueError, r"width.*1.*-5"),
        (lambda: Swin((2, 5), 0), ValueError, r"heads.*1.*0"),
        (lambda: Swin(7, 3), TypeError, r"window.*7"),
        (lambda: Swin((2, 3, 5), 3), TypeError, r"window.*\(2, 3, 5\)"),
        (lambda: dense(torch.ones(3, 5).bool()), TypeError, r"bias.*torch.bool"),
        (lambda: dense(torch.ones(3)), ValueError, r"bias.*2.*4.*shape.*\(3,\)"),
        (lambda: as_bias([[1.0]], (1, 1)), TypeError, r"bias.*list"),
        (lambda: as_bias(torch.ones(7, 5).long(), (7, 5)), TypeError, r"bias.*torch.int64"),
        (lambda: as_bias(torch.ones(5, 7), (7, 5)), ValueError, r"\(5, 7\)"),
    ],
)
def test_biases_refuse_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("alibi", (2, 5, 10, 10), r"alibi\(<3 slopes>\).*3.*5"),
        ("alibi, placed", (4, 3, 10, 10), r"2.*4"),
        ("T5", (2, 4, 10, 10), r"3.*4"),
        ("Shaw", (2, 3, 7, 10), r"10.*7"),
        ("Swin", (2, 3, 10, 11), r"SwinBias\(2×5 patches, 3 heads\).*10.*11"),
        ("Swin", (2, 2, 10, 10), r"3.*2"),
        ("dense", (2, 3, 10, 11), r"10.*11"),
    ],
)
def test_a_bias_that_does_not_fit_the_call_says_so(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        every_bias()[name].fit(*sizes)


def test_terms_and_offsets_must_agree_on_the_batch():
    bias = Shaw(7, 2).bias(torch.zeros(2, 3, 5, 7), 1.0).placed([1, 2, 3])
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        bias.fit(2, 3, 5, 5)


def test_modules_are_whole_on_the_meta_device():
    with torch.device("meta"):
        t5 = T5(3, buckets=8, max_distance=5)
    assert t5.table.is_meta
    assert t5.runs == T5(3, buckets=8, max_distance=5).runs
