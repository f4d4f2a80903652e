"""What is said of a picture, in Korean: how it was prepared, whose attention it is, and the kinds of tokens.

The English is the library's own. This file does not know the terminal, nor where the numbers come from.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.models.images.options import Plan
    from regard.models.images.pixel_steps import Numbers, Pad, Step
    from regard.models.images.sizes import Target

__all__ = ["kind_in_korean", "plan_in_korean", "title_in_korean"]

KINDS = {  # as the page calls them
    "text": "텍스트",
    "patch": "패치",
    "distillation": "증류 토큰",
    "register": "레지스터",
    "latent": "잠재 토큰",
    "padding": "패딩",
    "other pictures": "다른 이미지",
    "beyond the picture": "이미지 밖",
    "sink": "싱크",
}
# What an overlay's title is made of; a word in “…” stays as it was read.
TITLES = (
    (r"^all queries(?= → | \()|(?<= → )all queries$", "모든 쿼리"),
    (r"\(padding included\)", "(패딩 포함)"),
    (r"^the picture(?= → )|(?<= → )the picture$", "이미지"),
    (r"^picture (\d+)(?= → )|(?<= → )picture (\d+)$", r"이미지 \1\2"),
    (r"^(patch \(\d+, \d+\)|[a-z]+(?: \d+)?) of picture (\d+)", r"이미지 \2의 \1"),
)


def kind_in_korean(kind: str) -> str:
    """A kind of token; what has no other name stays.

    >>> kind_in_korean("patch"), kind_in_korean("cls")
    ('패치', 'cls')
    """
    return KINDS.get(kind, kind)


def title_in_korean(title: str) -> str:
    """Whose attention an overlay shows, and of what.

    >>> title_in_korean("cls → the picture"), title_in_korean("patch (1, 0) → picture 2")
    ('cls → 이미지', '패치 (1, 0) → 이미지 2')
    >>> title_in_korean("latent 0 of picture 1 → picture 1"), title_in_korean("all queries (padding included) → text")
    ('이미지 1의 잠재 토큰 0 → 이미지 1', '모든 쿼리 (패딩 포함) → 텍스트')
    """
    for english, korean in TITLES:
        title = re.sub(english, korean, title)
    return re.sub(r"(?<!“)\b(text|patch|distillation|register|latent|padding)\b(?= \(| \d| →|$)", _kind, title, count=1)


def plan_in_korean(plan: Plan) -> str:
    """Everything that is done to a picture, in order.

    >>> from regard.models.images.options import Plan
    >>> from regard.models.images.pixel_steps import Crop, Numbers, Resize
    >>> from regard.models.images.sizes import ShorterSide
    >>> numbers = Numbers(1 / 255, (0, 0, 0), (1, 1, 1))
    >>> plan_in_korean(Plan((Resize(ShorterSide(256), 3), Crop(224, 224)), numbers, None))
    '짧은 변을 256으로 크기 조정 (bicubic), 가운데 224 × 224 자르기, ÷ 255, 정규화'
    """
    parts = [*map(_step, plan.steps), _numbers(plan.numbers), *([] if plan.pad is None else [_pad(plan.pad)])]
    return ", ".join(parts)


def _kind(found: re.Match[str]) -> str:
    return KINDS[found[1]]


def _step(step: Step) -> str:
    from regard.models.images.pixel_steps import FILTERS, Crop, Square

    if isinstance(step, Square):
        return f"정사각형으로 채우기 (색 {', '.join(map(str, step.colour))})"
    if isinstance(step, Crop):
        return f"가운데 {step.height} × {step.width} 자르기"
    return f"{_target(step.target)} 크기 조정 ({FILTERS[step.resample]})"


def _target(target: Target) -> str:
    from regard.models.images.sizes import ShorterSide, Within

    if isinstance(target, ShorterSide):
        bound = "" if target.longest is None else f"(긴 변은 최대 {target.longest}) "
        return f"{bound}짧은 변을 {_to(target.side)}"
    into = f"{target.width} 안에 들어가게" if isinstance(target, Within) else _to(target.width)
    return f"{target.height} × {into}"


def _to(number: int) -> str:
    """A whole number with 로, or 으로 after a consonant other than ㄹ: 영, 삼, 육, and 십, 백, 천, 만.

    >>> _to(224), _to(256), _to(30), _to(1)
    ('224로', '256으로', '30으로', '1로')
    """
    return f"{number}{'으로' if number % 10 in (0, 3, 6) else '로'}"


def _numbers(numbers: Numbers) -> str:
    if numbers.scale is None and numbers.mean is None:
        return "0~255 그대로"
    return str(numbers).replace("normalise", "정규화")


def _pad(pad: Pad) -> str:
    size = "가장 큰 크기" if pad.size is None else f"{pad.size[0]} × {pad.size[1]}"
    return f"{size}까지 0으로 채우기"
