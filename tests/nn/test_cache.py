"""Caches: what comes back is what went in, to the bit, and what does not continue it is refused."""

import pytest
import torch

from regard.nn.attention import FixedCache, GrowingCache

B, H, D, DV = 2, 3, 5, 7
CHUNKS = (4, 1, 1, 6)  # 12 positions in all


def keys_and_values(n, dtype=torch.float32):
    return torch.randn(B, H, n, D, dtype=dtype), torch.randn(B, H, n, DV, dtype=dtype)


def fixed(length=13, dtype=torch.float32):
    return FixedCache(B, H, length, D, value_dim=DV, dtype=dtype)


CACHES = pytest.mark.parametrize("make", [GrowingCache, fixed])


# -------------------------------------------------------------------------------------------------------------- storage


@CACHES
def test_cache_gives_back_all_that_was_put_in_oldest_first(make):
    cache, kept_k, kept_v = make(), [], []
    for n in CHUNKS:
        k, v = keys_and_values(n)
        kept_k.append(k.clone())
        kept_v.append(v.clone())
        all_k, all_v = cache.append(k, v)
        assert torch.equal(all_k, torch.cat(kept_k, 2))
        assert torch.equal(all_v, torch.cat(kept_v, 2))
        assert len(cache) == all_k.shape[2]
    assert len(cache) == 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cache_keeps_the_dtype(dtype):
    for cache in (GrowingCache(), fixed(dtype=dtype)):
        cache.append(*keys_and_values(2, dtype))
        k, v = cache.append(*keys_and_values(3, dtype))
        assert (k.dtype, v.dtype) == (dtype, dtype)


@CACHES
def test_nothing_more_is_still_everything(make):
    cache = make()
    k, v = keys_and_values(3)
    cache.append(k, v)
    all_k, all_v = cache.append(*keys_and_values(0))
    assert torch.equal(all_k, k)
    assert torch.equal(all_v, v)
    assert len(cache) == 3


@CACHES
def test_what_the_caller_writes_afterwards_does_not_reach_the_cache(make):
    cache = make()
    k, v = keys_and_values(3)
    before = k.clone(), v.clone()
    cache.append(k, v)
    k.zero_()
    v.zero_()
    all_k, all_v = cache.append(*keys_and_values(1))
    assert torch.equal(all_k[:, :, :3], before[0])
    assert torch.equal(all_v[:, :, :3], before[1])


@CACHES
def test_clear_forgets_everything(make):
    cache = make()
    cache.append(*keys_and_values(4))
    cache.clear()
    assert len(cache) == 0
    k, v = keys_and_values(2)
    all_k, all_v = cache.append(k, v)
    assert torch.equal(all_k, k)
    assert torch.equal(all_v, v)


def test_a_cleared_growing_cache_takes_other_sizes():
    cache = GrowingCache()
    cache.append(*keys_and_values(4))
    cache.clear()
    assert cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))[0].shape == (1, 2, 3, 4)


def test_a_cleared_fixed_cache_has_its_whole_room_at_the_same_address():
    cache = fixed(length=5)
    first, _ = cache.append(*keys_and_values(5))
    cache.clear()
    again, _ = cache.append(*keys_and_values(5))
    assert again.data_ptr() == first.data_ptr()
    assert (len(cache), cache.length) == (5, 5)


# ------------------------------------------------------------------------------------------------ rows that come and go


@CACHES
@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [1, 0, 1], []], ids=str)
def test_keep_takes_the_rows_named_in_their_order(make, rows):
    cache, (k, v) = make(), keys_and_values(4)
    cache.append(k, v)
    cache.keep(torch.tensor(rows, dtype=torch.int64))
    assert len(cache) == 4
    more_k, more_v = torch.randn(len(rows), H, 2, D), torch.randn(len(rows), H, 2, DV)
    all_k, all_v = cache.append(more_k, more_v)
    assert torch.equal(all_k, torch.cat([k[rows], more_k], 2))
    assert torch.equal(all_v, torch.cat([v[rows], more_v], 2))


def test_keep_of_an_empty_cache_changes_nothing():
    growing, cache = GrowingCache(), fixed()
    growing.keep(torch.tensor([1]))
    assert len(growing) == 0
    cache.keep(torch.tensor([1, 0, 1]))
    assert cache.append(torch.ones(3, H, 2, D), torch.ones(3, H, 2, DV))[0].shape == (3, H, 2, D)


def test_a_fixed_cache_that_keeps_as_many_rows_stays_where_it_is():
    cache = fixed()
    first_k, first_v = cache.append(*keys_and_values(4))
    cache.keep(torch.tensor([1, 0]))
    k, v = cache.append(*keys_and_values(1))
    assert (k.data_ptr(), v.data_ptr()) == (first_k.data_ptr(), first_v.data_ptr())


# ---------------------------------------------------------------------------------------------------------- fixed: room


def test_fixed_cache_returns_views_of_one_place():
    cache = fixed()
    first_k, first_v = cache.append(*keys_and_values(4))
    for n in (1, 3):
        k, v = cache.append(*keys_and_values(n))
        assert k.data_ptr() == first_k.data_ptr()
        assert v.data_ptr() == first_v.data_ptr()
    assert k.untyped_storage().nbytes() == B * H * 13 * D * 4  # a view of the whole room, not a copy of a part
    assert v.untyped_storage().nbytes() == B * H * 13 * DV * 4


def test_no_room_is_an_error_that_leaves_the_cache_as_it_was():
    cache = fixed(length=6)
    k, v = keys_and_values(4)
    cache.append(k, v)
    with pytest.raises(ValueError, match=r"4.*6.*3"):
        cache.append(*keys_and_values(3))
    assert len(cache) == 4
    more_k, more_v = keys_and_values(2)
    all_k, all_v = cache.append(more_k, more_v)  # exactly what is left
    assert torch.equal(all_k, torch.cat([k, more_k], 2))
    assert torch.equal(all_v, torch.cat([v, more_v], 2))


def test_nbytes_counts_keys_and_values():
    assert fixed(length=11).nbytes == B * H * 11 * (D + DV) * 4
    assert fixed(length=11, dtype=torch.bfloat16).nbytes == B * H * 11 * (D + DV) * 2
    assert FixedCache(B, H, 11, D).nbytes == B * H * 11 * 2 * D * 4  # values as wide as keys unless given


def test_growing_cache_counts_the_bytes_it_holds_now():
    cache = GrowingCache()
    assert cache.nbytes == 0
    for n in (3, 5):
        k, v = cache.append(*keys_and_values(n))
    assert cache.nbytes == k.nbytes + v.nbytes > 0
    cache.crop(3)
    assert cache.nbytes == (k.nbytes + v.nbytes) * 3 // 8


def test_length_is_the_room_and_len_is_what_is_used():
    cache = fixed(length=11)
    assert (len(cache), cache.length) == (0, 11)
    cache.append(*keys_and_values(3))
    assert (len(cache), cache.length) == (3, 11)


@pytest.mark.parametrize("name", ["batch", "num_kv_heads", "length", "head_dim", "value_dim"])
def test_fixed_cache_refuses_sizes_below_one(name):
    sizes = {"batch": 2, "num_kv_heads": 3, "length": 5, "head_dim": 7, "value_dim": 11} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name}.*1.*0"):
        FixedCache(**sizes)


# ------------------------------------------------------------------------------------------------------------ gradients


def test_growing_cache_is_differentiable():
    cache = GrowingCache()
    parts = [tuple(x.requires_grad_() for x in keys_and_values(n)) for n in (2, 3)]
    for k, v in parts:
        all_k, all_v = cache.append(k, v)
    (3 * all_k.sum() + 5 * all_v.sum()).backward()
    for k, v in parts:
        assert torch.equal(k.grad, torch.full_like(k, 3.0))
        assert torch.equal(v.grad, torch.full_like(v, 5.0))


@pytest.mark.parametrize("which", [0, 1])
def test_fixed_cache_refuses_what_autograd_would_follow(which):
    cache, pair = fixed(), keys_and_values(2)
    pair[which].requires_grad_()
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\).*GrowingCache"):
        cache.append(*pair)
    assert len(cache) == 0
    with torch.no_grad():
        k, v = cache.append(*pair)
    assert not k.requires_grad
    assert not v.requires_grad


# --------------------------------------------------------------------------------------------------------------- errors


@CACHES
@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((H, 3, D), (H, 3, DV), r"\(3, 3, 5\).*\(3, 3, 7\)"),
        ((B, H, 3, D), (H, 3, DV), r"\(2, 3, 3, 5\).*\(3, 3, 7\)"),
        ((B, H, 3, D), (B, H, 4, DV), r"B.*Hkv.*\(2, 3, 3, 5\).*\(2, 3, 4, 7\)"),
        ((B, H, 3, D), (B, 1, 3, DV), r"\(2, 3, 3, 5\).*\(2, 1, 3, 7\)"),
        ((B, H, 3, D), (1, H, 3, DV), r"\(2, 3, 3, 5\).*\(1, 3, 3, 7\)"),
    ],
)
def test_keys_and_values_must_go_together(make, k, v, message):
    cache = make()
    with pytest.raises(ValueError, match=message):
        cache.append(torch.zeros(k), torch.zeros(v))
    assert len(cache) == 0


@CACHES
@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((1, H, 3, D), (1, H, 3, DV), r"batch.*1.*2"),
        ((B, 1, 3, D), (B, 1, 3, DV), r"1.*3"),
        ((B, H, 3, 1), (B, H, 3, DV), r"1.*5"),
        ((B, H, 3, D), (B, H, 3, 1), r"1.*7"),
    ],
)
def test_what_does_not_continue_the_cache_is_refused(make, k, v, message):
    cache = make()
    cache.append(*keys_and_values(2))
    with pytest.raises(ValueError, match=message):
        cache.append(torch.zeros(k), torch.zeros(v))
    assert len(cache) == 2


@CACHES
def test_another_dtype_is_refused(make):
    cache = make()
    cache.append(*keys_and_values(2))
    k, v = keys_and_values(1)
    with pytest.raises(ValueError, match=r"torch\.float64.*cpu.*torch\.float32.*cpu"):
        cache.append(k.double(), v)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*cpu.*torch\.float32.*cpu"):
        cache.append(k, v.bfloat16())
    assert len(cache) == 2


@CACHES
def test_under_autocast_another_dtype_is_refused_with_the_one_to_make_the_cache_in(make):
    cache, (k, v) = make(), keys_and_values(1)
    cache.append(*keys_and_values(2))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32.*cpu.*autocast.*torch\.bfloat16"):
            cache.append(k.bfloat16(), v.bfloat16())
        with pytest.raises(ValueError, match=r"torch\.float32.*cpu") as caught:
            cache.append(k.double(), v)
        assert "autocast" not in str(caught.value)  # which did not do this
    assert len(cache) == 2


@CACHES
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([True, False]), r"torch\.bool.*mask\.nonzero\(\)\[:, 0\]"),
        (torch.tensor([1, 0], dtype=torch.uint8), r"torch\.uint8"),  # which torch takes for a mask
        (torch.tensor([1.0, 0.0]), r"torch\.float32"),
    ],
    ids=["mask", "bytes", "floats"],
)
def test_rows_to_keep_are_whole_numbers(make, rows, message):
    cache = make()
    k, v = keys_and_values(3)
    cache.append(k, v)
    with pytest.raises(TypeError, match=f"rows.*int64.*int32.*{message}"):
        cache.keep(rows)
    assert torch.equal(cache.append(*keys_and_values(1))[0][:, :, :3], k)


@CACHES
def test_another_device_is_refused(make):
    cache = make()
    cache.append(*keys_and_values(2))
    with pytest.raises(ValueError, match=r"torch\.float32.*meta.*torch\.float32.*cpu"):
        cache.append(*(x.to("meta") for x in keys_and_values(1)))


# ---------------------------------------------------------------------------------------------------------------- print


def test_caches_print_what_they_hold():
    growing, room = GrowingCache(), fixed(length=11)
    assert repr(growing) == "GrowingCache(0 positions)"
    assert repr(room) == f"FixedCache(0 of 11 positions, {B * H * 11 * (D + DV) * 4} bytes)"
    for cache in (growing, room):
        cache.append(*keys_and_values(4))
    assert repr(growing) == "GrowingCache(4 positions)"
    assert repr(room) == "FixedCache(4 of 11 positions, 3168 bytes)"
