"""How a diagnosis reads: as text in two languages, as HTML, with the masks drawn."""

from types import SimpleNamespace

import pytest
import torch

from regard import masks
from regard.backends.call import prepare
from regard.lens.doctor import Diagnosis, draw, examine
from regard.lens.visibility import read_facts


def seen(path: str, nq: int = 3, nk: int = 3, n: int = 0, batch: int = 1, **arguments: object) -> SimpleNamespace:
    q, k = torch.zeros(batch, 2, nq, 4), torch.zeros(batch, 2, nk, 4)
    return SimpleNamespace(path=path, n=n, kind="self", facts=read_facts(prepare(q, k, k, **arguments)), heads={})


def troubled() -> Diagnosis:
    late = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    return examine([seen("layers.0.attn", mask=late), seen("layers.1.attn", mask=late)])


def test_text_has_findings_the_table_of_masks_and_their_bands():
    assert (
        troubled().text()
        == """\
2 attention calls in 2 modules: 1 error

error    layers.0–1.attn
         2 of 6 rows (a row is one query in one head) see no key at all; the first is batch row 0, head 0, query 0
         → let each query see at least its own position; what such a row gives depends on the kernel: 0 or NaN

where            kind  mask               future hidden  bias  queries × keys  calls
───────────────  ────  ─────────────────  ─────────────  ────  ──────────────  ─────
layers.0–1.attn  self  causal, offset -1  by the mask    –     3 × 3               2

layers.0–1.attn: causal, offset -1 (3 queries × 3 keys)
· · ·
■ · ·
■ ■ ·

■ visible  ▒ partly  · hidden"""
    )


def test_text_in_korean_says_the_same():
    assert (
        troubled().text("ko")
        == """\
모듈 2개의 어텐션 호출 2개: 오류 1개

오류     layers.0–1.attn
         6행 가운데 2행(헤드마다 쿼리 하나가 한 행)이 키를 하나도 보지 못함. 첫 번째는 배치 0행, 헤드 0, 쿼리 0
         → 쿼리마다 적어도 자기 위치는 보게 하세요. 이런 행의 결과는 커널에 따라 0이거나 NaN입니다

위치             종류  마스크             미래 가림  bias  쿼리 × 키  호출
───────────────  ────  ─────────────────  ─────────  ────  ─────────  ────
layers.0–1.attn  셀프  causal, offset -1  마스크로   –     3 × 3         2

layers.0–1.attn: causal, offset -1 (쿼리 3개 × 키 3개)
· · ·
■ · ·
■ ■ ·

■ 보임  ▒ 일부  · 가려짐"""
    )


def test_masks_that_are_words_are_korean_words():
    cross = seen("attn")
    cross.kind = "cross"
    assert examine([cross]).text("ko").splitlines()[-1].split()[:3] == ["attn", "크로스", "없음"]


def test_nothing_found_is_said():
    healthy = examine([seen("attn", mask=masks.causal())])
    assert repr(healthy).startswith("1 attention call in 1 module: nothing found\n")
    assert healthy.text("ko").startswith("모듈 1개의 어텐션 호출 1개: 이상 없음\n")
    assert str(examine([])) == "0 attention calls in 0 modules: nothing found"


def test_calls_that_could_not_be_read_are_told():
    lost = SimpleNamespace(path="attn", n=0, kind="self", facts=None, heads={})
    assert "calls that could not be read and are not judged: 1" in examine([lost]).text()
    assert "판단하지 않은 호출: 1개" in examine([lost]).text("ko")


def test_masks_that_hide_nothing_and_single_queries_are_not_drawn():
    plain = examine([seen("a"), seen("a", 1, 5, n=1, mask=torch.tensor([True, False, True, True, True]))])
    assert "■" not in plain.text()
    assert "1 × 5" in plain.text()


def test_keys_of_generated_steps_are_a_range():
    run = [seen("attn", mask=masks.causal()), *(seen("attn", 1, 3 + t, n=t) for t in (1, 2, 3))]
    assert "1 × 4–6" in examine(run).text()


def test_batch_row_with_padding_is_the_one_that_is_drawn():
    run = [seen("attn", batch=2, mask=masks.padding([3, 2]).dense(3))]
    text = examine(run).text()
    assert "attn: all visible, padding right (batch row 1, head 0; 3 queries × 3 keys)\n■ ■ ·" in text


def test_only_the_first_masks_are_drawn_and_the_rest_counted():
    run = [seen(f"block{n}", 9, 9, mask=masks.window(n, 0)) for n in range(8)]
    text = examine(run).text()
    assert text.count("queries × 9 keys") == 6
    assert text.endswith("masks that are not drawn: 2")
    assert examine(run).text("ko").endswith("그리지 않은 마스크: 2가지")


def test_html_has_tables_and_bands_with_everything_escaped():
    page = examine([seen("<attn>", bias=torch.ones(3, 3).tril(), mask=masks.causal())])._repr_html_()
    assert page.count("<table>") == 2
    assert "&lt;attn&gt;" in page
    assert "<attn>" not in page
    assert "<pre>&lt;attn&gt;: causal (3 queries × 3 keys)\n■ · ·\n■ ■ ·\n■ ■ ■</pre>" in page
    assert "<td>error</td>" in page
    assert "<table>" not in examine([])._repr_html_()


def test_bands_are_drawn_with_three_signs():
    assert draw(torch.tensor([[0, 1, 254, 255]], dtype=torch.uint8)) == "· ▒ ▒ ■"


def test_unknown_language_is_refused():
    with pytest.raises(ValueError, match=r"lang.*'en'.*'ko'.*'de'"):
        troubled().text("de")
