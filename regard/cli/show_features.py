"""`regard features`: the vectors of a picture's patches, where they lie.

It reads options and prints or writes what `regard.models.verbs.featuring` finds.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.model_files import open_model
from regard.cli.npy_files import as_numpy_has_it, check_npy, write_npy
from regard.cli.picture_input import read_pictures, require_sight
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal

if TYPE_CHECKING:
    from regard.models.verbs.featuring import Features

__all__ = ["add"]

# The head that a checkpoint has does not matter: the tower is asked.
TASKS = ["none", "encode", "classify", "classify-cls", "rebuild", "caption", "answer", "match", "generate"]


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'features'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "features",
        help=say(
            "The vectors of a picture's patches as a map, for detection, segmentation, search.\n\n"
            "--out writes the map, (numbers, rows, columns). PICTURE '-' is standard input.",
            "이미지 패치들의 벡터를 맵으로 만듭니다. 탐지, 분할, 검색용.\n\n"
            "--out은 (벡터 크기, 행, 열) 맵을 저장합니다. "
            "PICTURE가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def features(
        picture: Annotated[str, typer.Argument(metavar="PICTURE", help=say("A path.", "경로."))],
        model: Annotated[str, options.model],
        layer: Annotated[
            int | None,
            typer.Option(metavar="N", help=say("After N blocks; -1 is the last.", "N번째 블록 뒤. -1은 마지막.")),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Write the map, .npy.", "맵을 저장, .npy."))
        ] = None,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        check_npy(out)
        (given,) = read_pictures([picture])
        opened = open_model(model, "features", TASKS, dtype=dtype, device=device, ignore=ignore or ())
        require_sight(opened, "features")
        found = opened.features(given, layer=layer)
        if out is not None:
            write_npy(found.map, out)
        if json_:
            print(_as_json(model, picture, layer, found, out))
        else:
            _print(found, out, spoken)


def _print(found: "Features", out: Path | None, say: Say) -> None:
    terminal = Terminal()
    (high, wide), (rows, columns) = found.frame.picture, found.grid
    pixels, tokens = " × ".join(map(str, found.frame.pixels)), len(found.vectors)
    terminal.print(
        say(
            f"{found.name}: {high} × {wide}, seen as {pixels} pixels",
            f"{found.name}: {high} × {wide}, 모델 입력 {pixels}픽셀",
        )
    )
    d = found.vectors.shape[1]
    terminal.print(
        say(f"tokens: {tokens}, numbers in each vector: {d}", f"토큰 {tokens}개, 벡터 크기 {d}"),
    )
    terminal.print(say(f"map: {rows} rows, {columns} columns", f"맵: {rows}행 {columns}열"))
    if out is not None:
        terminal.print(say(f"Map: {out}", f"맵 파일: {out}"))


def _as_json(model: str, picture: str, layer: int | None, found: "Features", out: Path | None) -> str:
    """Every number; of the map only the place where it was written, if it was."""
    frame = found.frame
    said: dict[str, Any] = {
        "model": model,
        "picture": picture,
        "layer": layer,
        "size": list(frame.picture),
        "pixels": list(frame.pixels),
        "scale": list(frame.scale),
        "corner": list(frame.corner),
        "grid": list(found.grid),
        "cls": None if found.cls is None else as_numpy_has_it(found.cls).tolist(),
        "pooled": None if found.pooled is None else as_numpy_has_it(found.pooled).tolist(),
        "map": as_numpy_has_it(found.map).tolist() if out is None else str(out),
    }
    return json.dumps(finite(said), ensure_ascii=False)
