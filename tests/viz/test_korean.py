"""Figures in Korean: their own words are Korean, and nothing English is left in them."""

import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import regard
from regard import figures, masks
from regard.layouts import Frame, Layout, Sides
from regard.lens.overlays import TokenPlacement
from regard.lens.view import View

TOKENS = ["나는", "고양이를", "보았다"]
PATCHES = [[0, 0, 4, 4], [0, 4, 4, 8]]


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.1, 1.0, shape)


def view(heads: int = 2, n: int = 5) -> View:
    x = torch.from_numpy(weights(1, heads, n, 4))
    return regard.look(x, x, x)


def placed(sides: Sides, words: list[str] | None = None) -> View:
    q, k = (torch.from_numpy(weights(1, 2, side.shape[1], 4)) for side in (sides.queries, sides.keys))
    looked = regard.look(q, k, k)
    looked.placed = TokenPlacement(sides=(sides,), words=None if words is None else [words])
    return looked


# name → (drawn, words that must be there, English that may stay: names that were given, and code)
DRAWN = {
    "atlas": (
        lambda: figures.atlas([[0.5, 1.5], [2.0, np.nan]], layers=["a.0.x", "a.1.x"], lang="ko"),
        {"헤드 →", "레이어 ↓", "엔트로피", "(nat)", "없는 헤드", "0 = a.0.x"},
        {"nat"},
    ),
    "atlas of a pattern": (
        lambda: figures.atlas([[0.5, np.nan], [0.1, np.inf]], heads=[2, 2], measure="own", lang="ko"),
        {"자기 자신", "NaN 또는 무한대"},
        {"NaN", "inf"},
    ),
    "atlas of unknown heads": (
        lambda: figures.atlas([[0.5, np.inf], [np.nan, np.nan]], measure="effective", lang="ko"),
        {"유효 키 수", "없는 헤드이거나 알 수 없음", "무한대"},
        {"inf"},
    ),
    "crowded atlas": (
        lambda: figures.atlas(weights(7, 256), labels=[["neighbours", *["next"] * 255]] * 7, lang="ko"),
        {"칸이 작아 레이블 생략"},
        {"nat"},
    ),
    "map": (
        lambda: figures.map_with_marginals(
            weights(3, 3), figures.Axis(tokens=TOKENS, marginal=weights(3), marked=2),
            figures.Axis(marginal=weights(3), marked=1), sink=False, lang="ko",
        ),
        {"보는 대상 →", "보는 쪽 ↓", "받은 가중치", "엔트로피", "가중치", "정확한 값: 한 칸이 가중치 하나"}
        | {"빗금: 키 0(색에서 제외)", f"테두리: 쿼리 “{TOKENS[2]}” (2)", f"점선: 키 “{TOKENS[1]}” (1)"},
        {"nat"},
    ),
    "pooled map": (
        lambda: figures.map_with_marginals(
            weights(64, 64), figures.Axis(positions=4096, marginal=[np.nan] * 4096, marked=70),
            figures.Axis(marginal=weights(4096), marked=5), scale="log", sink=False, lang="ko",
        ),
        {"칸별 가중치,", "로그 스케일", "풀링: 한 칸이 토큰 64 × 64개", "빗금: 키 0~63(색에서 제외)", "유한한 값 없음"}
        | {"테두리: 쿼리 70", "점선: 키 5"}
        | {"받은 가중치 막대: 키 7개 중 최댓값", "엔트로피 막대: 쿼리 7개의 평균"},
        set(),
    ),
    "ranked map": (
        lambda: figures.map_with_marginals(np.diag([1.0, 2.0, 3.0]), scale="rank", sink=False, lang="ko"),
        {"순위 기준", "0보다 큰 값의 절반은 2.5 미만", "풀링한 칸", "빗금: 첫 열(색에서 제외)", "정확히 0"},
        set(),
    ),
    "long range": (
        lambda: figures.map_with_marginals(np.array([[1.0, 1e-9]]), scale="log", lang="ko"),
        {"1e-06 이하"},
        set(),
    ),
    "text": (
        lambda: figures.text_heat(TOKENS, [0.2, 0.7, 0.1], query=2, sink=False, lang="ko"),
        {"가중치", "테두리: 쿼리 “보았다” (2)", "빗금: 토큰 0, 가중치 0.2(색에서 제외)"},
        set(),
    ),
    "long text": (
        lambda: figures.text_heat(["말"] * 3001, np.eye(3001)[1500], query="무엇", lang="ko"),
        {"쿼리: “무엇”", "토큰 3,001개 중 가중치가 큰 곳 주변 25개", "… 토큰 1,488개, 합계 0 …"},
        set(),
    ),
    "columns": (
        lambda: figures.links(TOKENS, [(2, 1, 0.7), (0, 1, 0.4)], lang="ko"),
        {"가중치", "연결 2개", "보는 쪽", "보는 대상"},
        set(),
    ),
    "arcs": (
        lambda: figures.links(TOKENS, [(2, 1, 0.7), (0, 1, 0.4)], kind="arcs", lang="ko"),
        {"위: 앞쪽 토큰이나 자기 자신을 봄", "아래: 뒤쪽 토큰을 봄", "점: 보는 대상"},
        set(),
    ),
    "one link": (lambda: figures.links(TOKENS, [(2, 1, 0.7)], lang="ko"), {"연결 1개"}, set()),
    "mask": (
        lambda: figures.mask(masks.causal(), 3, lang="ko"),
        {"보는 대상 →", "보는 쪽 ↓", "볼 수 있음", "가려짐"},
        {"causal"},
    ),
    "mask of tiles": (
        lambda: figures.mask(masks.causal(), 512, title="", lang="ko"),
        {"모두 볼 수 있음", "일부만", "모두 가려짐", "타일 하나는 8 × 8칸"},
        set(),
    ),
    "steps": (
        lambda: figures.steps(
            regard.steps(np.eye(3), np.eye(3), np.eye(3), mask=masks.causal(), softcap=2.0, bias=np.eye(3)), lang="ko"
        ),
        {"점수 scores", "스케일 조정 scaled", "softcap capped", "bias 더함 biased", "마스크 적용 masked"}
        | {"가중치 weights", "출력 output", "특징 →", "가려짐", "점수", "가중치", "출력"},
        {"scores", "scaled", "capped", "biased", "masked", "weights", "output", "softcap", "bias", "softmax", "tanh"}
        | {"where", "causal", "dense", "torch", "float"},
    ),
    "overlay": (
        lambda: figures.overlay(PATCHES, [0.5, np.nan], (4, 12), outline=PATCHES[0], lang="ko"),
        {"가중치", "선택한 패치", "NaN 또는 무한대", "빗금: 모델에 들어가지 않은 부분"},
        {"NaN"},
    ),
    "overlay of a view": (
        lambda: placed(Sides.patches(8, patch=4)).overlay(token="cls").figure(lang="ko"),
        {"헤드 2개의 평균: cls → 이미지"},
        {"cls"},
    ),
    "view": (lambda: view().show(lang="ko"), {"쿼리 5개 × 키 5개, 정확한 값", "헤드 0", "가중치"}, set()),
    "long view": (
        lambda: view(17, 67).show(lang="ko"),
        {"쿼리 67개 × 키 67개, 64 × 64칸으로 풀링, 헤드 17개 중 처음 16개"},
        set(),
    ),
    "head": (lambda: view().show(head=1, lang="ko"), {"헤드 1", "받은 가중치", "엔트로피"}, {"nat"}),
}  # fmt: skip


def words(figure: Figure) -> set[str]:
    return {text.get_text() for part in (figure, *figure.axes) for text in part.texts} - {""}


@pytest.mark.parametrize("name", DRAWN)
def test_words_of_a_figure_are_korean(name):
    draw, expected, may_stay = DRAWN[name]
    drawn = words(draw())
    assert sorted(expected - drawn) == []
    assert {word for text in drawn for word in re.findall("[A-Za-z]{3,}", text)} <= may_stay


def test_capture_is_shown_in_korean():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.zeros(1, 3, 8))
    assert {"헤드 →", "레이어 ↓", "엔트로피"} <= words(seen.show(lang="ko"))
    assert {"TransformerEncoderLayer, 레이어 0, 헤드 1", "엔트로피"} <= words(seen.show(0, head=1, lang="ko"))


def test_html_is_korean():
    atlas = figures.atlas_html([[0.5, 1.5]], lang="ko")
    assert "레이어 0, 헤드 1: 1.5 nat" in atlas
    assert "행: 레이어, 열: 헤드" in atlas
    assert "레이어 1개 × 헤드 2개의 엔트로피 (nat)" in atlas
    text = figures.text_heat_html(TOKENS, [0.2, 0.7, 0.1], query=2, lang="ko")
    assert "토큰 1: 0.7" in text
    assert "테두리: 쿼리 “보았다” (2)" in text
    assert "토큰 3개의 어텐션 가중치" in text


def test_titles_of_overlays_are_korean():
    both = Layout.grid(1, 2, (4, 4), before=("cls", "register", "register")) + Layout.latents(2, image=0)
    both += Layout.grid(2, 1, (4, 4), before=("cls",), image=1)
    looked = placed(Sides(both, both, (Frame.whole(4, 8), Frame.whole(8, 4))))
    titles = [looked.overlay(token=n, head=1).titles["ko"] for n in (0, 2, 4, 5, 9)]
    assert titles == [
        "헤드 1: 이미지 0의 cls → 이미지 0",
        "헤드 1: 레지스터 1 → 이미지 0",
        "헤드 1: 패치 (0, 1) → 이미지 0",
        "헤드 1: 잠재 토큰 0 → 이미지 0",
        "헤드 1: 이미지 1의 패치 (1, 0) → 이미지 0",
    ]
    assert looked.overlay(token=0, column=True).titles["ko"] == "헤드 2개의 평균: 이미지 0 → 이미지 0의 cls"
    assert looked.overlay().titles["ko"] == "헤드 2개의 평균: 모든 쿼리 → 이미지 0"
    words = placed(Sides.patches(8, patch=4), ["the image", "patch", "a", "b", "c"])
    assert words.overlay(token=0).titles["ko"] == "헤드 2개의 평균: “the image” (0) → 이미지"


@pytest.mark.parametrize(
    "draw",
    [
        lambda lang: figures.atlas([[1.0]], lang=lang),
        lambda lang: figures.atlas_html([[1.0]], lang=lang),
        lambda lang: figures.map_with_marginals([[1.0]], lang=lang),
        lambda lang: figures.text_heat(["a"], [1.0], lang=lang),
        lambda lang: figures.text_heat_html(["a"], [1.0], lang=lang),
        lambda lang: figures.links(["a"], [(0, 0, 1.0)], lang=lang),
        lambda lang: figures.mask(masks.causal(), 2, lang=lang),
        lambda lang: figures.steps(regard.steps(np.eye(2), np.eye(2), np.eye(2)), lang=lang),
        lambda lang: figures.overlay(PATCHES, [1.0, 1.0], (4, 8), lang=lang),
        lambda lang: placed(Sides.patches(8, patch=4)).overlay().figure(lang=lang),
        lambda lang: view().show(lang=lang),
    ],
)
def test_unknown_language_is_refused(draw):
    with pytest.raises(ValueError, match="'fr'"):
        draw("fr")
