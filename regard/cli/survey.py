"""`regard survey`: a measure of every head over a corpus."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.commands import SurveyOptions
from regard.cli.inputs import check_device, torch_dtype
from regard.cli.outputs import bar, print_json

if TYPE_CHECKING:
    from regard.edits.survey import Survey
    from regard.models.model import Model

INTERRUPTED = 130


def survey(options: SurveyOptions) -> int:
    """Survey a corpus and print the strongest heads; 130 if it was interrupted."""
    import torch.distributed as dist

    from regard.edits.survey import SurveyInterrupted, read_measures
    from regard.edits.survey import survey as run
    from regard.session.default_models import default_model, name_of

    # 1. What is wrong with the options alone.
    measures = read_measures(options.measure or ("induction",))
    if not options.texts.is_file():
        raise FileNotFoundError(f"there is no file {str(options.texts)!r}")
    if options.top < 1:
        raise ValueError(f"--top must be at least 1, got {options.top}")

    # 2. Survey, and print from the first process.
    name = default_model() if options.model is None else options.model
    try:
        result = run(
            open_model(name, options), options.texts, measures, out=options.out, batch_size=options.batch,
            limit=options.limit, length=options.length,
        )  # fmt: skip
        if not dist.is_initialized() or dist.get_rank() == 0:
            if options.json:
                print_json({"model": str(name)} | as_json(result))
            else:
                print(name_of(Path(name)), result.text(options.lang, options.top), sep="   ")
    except SurveyInterrupted as stopped:
        values = {"done": stopped.done, "total": stopped.total}
        lost = options.say("stopped after {done:,} of {total:,} texts; with --out DIR they would be kept", **values)
        kept = options.say("stopped: {done:,} of {total:,} texts are kept; the same command goes on", **values)
        if not dist.is_initialized() or dist.get_rank() == 0:  # of whose texts it speaks
            print(f"regard: {lost if stopped.out is None else kept}", file=sys.stderr, flush=True)
        return INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def open_model(name: str | Path, options: SurveyOptions) -> Model:
    """Load the model, with the checkpoint's own head. A process of torchrun takes the device of its number."""
    from torch import device

    from regard.models.loading import load

    where = options.device
    if where != "cpu" and device(where).index is None and "LOCAL_RANK" in os.environ:
        where = f"{where}:{os.environ['LOCAL_RANK']}"
    check_device(where)
    dtype = None if options.dtype is None else torch_dtype(options.dtype)
    with bar("/".join(Path(name).parts[-2:])) as tick:
        return load(name, device=where, dtype=dtype, ignore=options.ignore, progress=tick)


def as_json(result: Survey) -> dict[str, object]:
    """All numbers of a survey; the outputs of heads too."""
    measures = {
        name: {part: getattr(result[name], part).tolist() for part in ("mean", "low", "high", "count")}
        for name in result.sums
    }
    outputs = {name: mean.tolist() for name, mean in result.outputs.items()} if result.output_sums else {}
    return {"texts": result.texts, "layers": result.names, "measures": measures, "outputs": outputs}
