"""config.json read key by key: numbers of the right kind, defaults for null, and nothing left over in silence."""

import re

import pytest

from regard.models.family import Config

# ------------------------------------------------------------------------------------------------------------- the file


def test_open_reads_the_config_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 12, "이름": "값"}', encoding="utf-8")
    config = Config.open(tmp_path)
    assert config.values == {"hidden_size": 12, "이름": "값"}
    assert config.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("files", "listed"),
    [
        ([], "nothing"),
        (["b.txt", "a.bin"], "a.bin, b.txt"),
        ([f"{i:02}" for i in range(13)], "00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11 …"),
    ],
)
def test_a_directory_without_a_config_is_refused_with_what_it_holds(files, listed, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    message = rf"{re.escape(str(tmp_path))}.*config\.json.*{re.escape(listed)}"
    with pytest.raises(FileNotFoundError, match=message):
        Config.open(tmp_path)


def test_a_directory_that_is_not_there_holds_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Config.open(tmp_path / "missing")


def test_a_config_that_is_a_link_to_nothing_is_called_that(tmp_path):
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Config.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json.*JSON.*Expecting"),
        (b"", r"config\.json.*JSON.*Expecting"),
        (b"\xff\xfe{}", r"config\.json.*JSON.*'utf-8'"),
        (b"[1]", r"config\.json.*JSON.*list"),
        (b"3", r"config\.json.*JSON.*int"),
        (b"[" * 10**5, r"config\.json.*JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", r"config\.json.*JSON.*Exceeds"),
    ],
)
def test_a_config_that_is_no_object_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Config.open(tmp_path)


# ----------------------------------------------------------------------------------------------------------- the values


def test_null_is_missing():
    config = Config({"a": None, "b": 0})
    assert "a" not in config
    assert "b" in config
    assert config.get("a", 3) == 3
    assert config.get("b", 3) == 0
    assert config.get("c") is None
    assert config.int("a", 5) == 5


@pytest.mark.parametrize(
    ("read", "value", "got"),
    [
        (lambda s: s.int("x"), 12, 12),
        (lambda s: s.int("x"), 2**31 - 1, 2**31 - 1),
        (lambda s: s.int("x", minimum=0), 0, 0),
        (lambda s: s.layers("x"), 2000, 2000),
        (lambda s: s.ints("x"), [2, 2, 6], [2, 2, 6]),
        (lambda s: s.ints("x", [3, 1]), None, [3, 1]),
        (lambda s: s.float("x"), 3, 3.0),
        (lambda s: s.float("x"), 1e-5, 1e-5),
        (lambda s: s.float("x"), -3, -3.0),
        (lambda s: s.eps("x"), 0, 0.0),
        (lambda s: s.eps("x", 1e-6), None, 1e-6),
        (lambda s: s.bool("x", True), False, False),
        (lambda s: s.str("x"), "gelu", "gelu"),
        (lambda s: s.tie_word_embeddings(), None, True),
        (lambda s: s.tie_word_embeddings(False), None, False),
        (lambda s: s.only("x", 1, 2), 2, None),
        (lambda s: s.only("x", 1, 2), None, None),
    ],
)
def test_values_of_the_right_kind_are_read(read, value, got):
    made = read(Config({"x": value}))
    assert made == got
    assert type(made) is type(got)


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda s: s.int("x"), None, "x"),
        (lambda s: s.int("x"), 0, r"x.*1.*2147483647.*0"),
        (lambda s: s.float("x"), float("nan"), r"x.*nan"),
        (lambda s: s.float("x"), float("-inf"), r"x.*-inf"),
        pytest.param(lambda s: s.float("x"), 10**400, f"x.*1{'0' * 79}", id="beyond floats"),
        (lambda s: s.eps("x"), float("nan"), r"x.*nan"),
        (lambda s: s.eps("x"), -1.0, r"x.*0.*-1\.0"),
        (lambda s: s.int("x", minimum=0), -1, r"x.*0.*2147483647.*-1"),
        (lambda s: s.int("x"), 2**31, r"x.*1.*2147483647.*2147483648"),
        (lambda s: s.int("x"), 12.0, r"x.*1.*2147483647.*12\.0"),
        (lambda s: s.int("x"), True, r"x.*1.*2147483647.*True"),
        (lambda s: s.int("x"), "12", r"x.*1.*2147483647.*'12'"),
        (lambda s: s.int("x", maximum=7), 8, r"x.*1.*7.*8"),
        (lambda s: s.layers("x"), 2001, r"x.*2001.*2000"),
        (lambda s: s.ints("x"), None, "x"),
        (lambda s: s.ints("x"), 6, r"x.*1.*6"),
        (lambda s: s.ints("x"), [], r"x.*1.*\[\]"),
        (lambda s: s.ints("x"), [2, 0], r"x.*1.*\[2, 0\]"),
        (lambda s: s.ints("x"), [2, True], r"x.*1.*\[2, True\]"),
        (lambda s: s.float("x"), None, "x"),
        (lambda s: s.float("x"), "0.1", r"x.*'0\.1'"),
        (lambda s: s.float("x"), False, r"x.*False"),
        (lambda s: s.bool("x", True), 1, r"x.*1"),
        (lambda s: s.str("x"), None, "x"),
        (lambda s: s.str("x", "gelu"), 3, r"x.*3"),
        (lambda s: s.only("x", 1, None), 3, r"x.*3.*1.*None"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(read, value, message):
    with pytest.raises(ValueError, match=f"here.*{message}"):
        read(Config({"x": value}, "here"))


def test_labels_are_named_in_the_order_of_their_numbers():
    named = {str(i): f"label {i}" for i in (10, 2, 0, 1, 9, 3, 4, 5, 8, 7, 6)}
    assert Config({"id2label": named}).labels() == tuple(f"label {i}" for i in range(11))
    assert Config({"num_labels": 3}).labels() == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert Config({}).labels() == ("LABEL_0", "LABEL_1")
    assert Config({}).labels(1) == ("LABEL_0",)
    with pytest.raises(ValueError, match="num_labels"):
        Config({"num_labels": -1}).labels()
    for named in (["bad", "good"], {"bad": 0, "good": 1}):
        with pytest.raises(ValueError, match="id2label"):
            Config({"id2label": named}).labels()


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ("1 2 3", "1, 2, 3.*3.*0.*2"),
        ("0 2 3", "0, 2, 3.*3.*0.*2"),
        ("0 1 01", "0, 1, 01.*3.*0.*2"),
        ("1 2 3 4 5 6 7 8 9", "1, 2, 3, 4, 5, 6, 7, 8.*9.*0.*8"),
    ],
)
def test_names_whose_numbers_do_not_count_from_0_are_refused_and_counted(numbers, said):
    config = Config({"id2label": {number: f"label {number}" for number in numbers.split()}}, "here")
    message = rf"here.*id2label.*{said}.*model\.config\.values.*id2label"
    with pytest.raises(ValueError, match=message):
        config.labels()
    assert config.num_labels() == len(numbers.split())


def test_ignored_keys_are_left_out_unless_somebody_read_them():
    values = {"size": 3, "odd": 5, "top_k": 50, "other": 7, "part": {"size": 2, "odd": 1}, "none": None}
    config = Config(values)
    config.int("size")
    config.sub_config("part").int("size")
    config.sub_config("none")
    kept = config.without_ignored(harmless=["other"], ignore=["size", "odd", "top_k", "other"])
    assert kept == {"size": 3, "top_k": 50, "other": 7, "part": {"size": 2}, "none": None}
    assert config.without_ignored(ignore=["odd"])["other"] == 7, "not ignored, and refused elsewhere"
    assert values["part"] == {"size": 2, "odd": 1}, "what was given stays"


# --------------------------------------------------------------------------------------------------- what nobody read


def test_what_nobody_read_is_refused_by_name_and_value():
    config = Config({"hidden_size": 12, "a": [1], "b": "x", "c": None, "model_type": "bert"}, "here")
    config.int("hidden_size")
    with pytest.raises(ValueError, match=r"^here.*BERT.*a = \[1\], b = 'x'.*ignore=\[\"a\", \"b\"\]"):
        config.check_unused("BERT")


def test_every_way_of_reading_counts_as_read():
    config = Config({"a": 1, "b": 1, "c": 1.0, "d": True, "e": "x", "f": 1, "g": 1, "tie_word_embeddings": True})
    assert set(config.unused_keys()) == set(config.values)
    config.get("a"), config.int("b"), config.float("c"), config.bool("d", False), config.str("e")
    config.only("f", 1), config.layers("g"), config.tie_word_embeddings()
    assert config.unused_keys() == {}
    config.check_unused("GPT-2")


def test_asking_whether_a_key_is_there_does_not_read_it():
    config = Config({"a": 1})
    assert "a" in config
    assert config.unused_keys() == {"a": 1}


def test_keys_may_be_harmless_always_to_the_family_or_to_the_user():
    config = Config({"transformers_version": "5", "of_family": 1, "of_user": 2})
    config.check_unused("T5", harmless=("of_family",), ignore=["of_user"])
    with pytest.raises(ValueError, match=r"of_user.*2"):
        config.check_unused("T5", harmless=("of_family",))
    with pytest.raises(ValueError, match=r"of_family.*1"):
        config.check_unused("T5", ignore=["of_user"])


@pytest.mark.parametrize("key", ["is_decoder", "add_cross_attention", "pruned_heads"])
def test_what_turns_a_model_into_another_is_refused_unless_it_is_off(key):
    off, on = ({}, {"0": [1]}) if key == "pruned_heads" else (False, True)
    Config({key: off}).check_unused("BERT")
    Config({key: None}).check_unused("BERT")
    with pytest.raises(ValueError, match=rf"{key}.*{re.escape(repr(on))}.*{off}.*None"):
        Config({key: on}).check_unused("BERT")
    read = Config({key: on})
    read.get(key)  # a family that knows what to do with it
    read.check_unused("BERT")
