"""What a checkpoint says of generating: read from either file, and refused where it is not understood."""

from __future__ import annotations

from typing import Any

import pytest

from regard.generation.config import HARMLESS, NEUTRAL, READ, GenerationConfig

BART = {
    "num_beams": 4,
    "max_length": 142,
    "min_length": 56,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 3,
    "early_stopping": True,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
}


def from_file(**values: Any) -> GenerationConfig:
    return GenerationConfig(**{"do_sample": False, **values})


READ_BART = from_file(**{key: value for key, value in BART.items() if key != "eos_token_id"}, eos_token_ids=2)


def test_generation_config_is_read() -> None:
    assert GenerationConfig.from_files(BART, {}) == READ_BART


def test_older_config_is_read_where_there_is_no_generation_config() -> None:
    assert (
        GenerationConfig.from_files(None, {**BART, "d_model": 8, "vocab_size": 3, "task_specific_params": {"a": 1}})
        == READ_BART
    )


def test_config_only_says_which_tokens_are_which_beside_a_generation_config() -> None:
    found = GenerationConfig.from_files({"max_new_tokens": 7, "bos_token_id": None}, BART)
    assert found == from_file(
        max_new_tokens=7, eos_token_ids=2, pad_token_id=1, bos_token_id=0, decoder_start_token_id=2
    )
    assert GenerationConfig.from_files({"eos_token_id": [5, 7]}, BART).eos_token_ids == (5, 7)


def test_nothing_said_is_greedy() -> None:
    assert GenerationConfig.from_files({}, {}) == GenerationConfig.from_files(None, {}) == from_file()
    assert from_file().samples is False


def test_sampling_without_a_number_is_among_fifty_as_in_transformers() -> None:
    assert GenerationConfig.from_files({"do_sample": True}, {}).top_k == 50
    assert GenerationConfig.from_files({"do_sample": True, "top_k": 0}, {}).top_k == 0
    assert GenerationConfig.from_files(
        {"do_sample": True, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "temperature": 0.75}, {}
    ) == (from_file(do_sample=True, top_k=7, top_p=0.5, min_p=0.25, temperature=0.75))


def test_new_tokens_overrule_lengths_with_the_prompt() -> None:
    assert GenerationConfig.from_files({"min_new_tokens": 3, "min_length": 20}, {}) == from_file(min_new_tokens=3)


def test_single_tokens_are_banned_but_for_those_that_end_a_text() -> None:
    values = {"bad_words_ids": [[7], [2], [11]], "suppress_tokens": [13, 7], "eos_token_id": 2}
    assert GenerationConfig.from_files(values, {}).suppress_tokens == (7, 11, 13)


def test_tokens_may_be_lists_of_one() -> None:
    found = GenerationConfig.from_files({"forced_eos_token_id": [3], "pad_token_id": [0], "stop_strings": ["END"]}, {})
    assert (found.forced_eos_token_id, found.pad_token_id, found.stop_strings) == (3, 0, ("END",))


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_setting_that_is_not_offered_is_refused_unless_neutral_or_ignored(key: str) -> None:
    for values in ({key: NEUTRAL[key]}, {key: None}):
        assert GenerationConfig.from_files(values, {}) == GenerationConfig.from_files(None, values) == from_file()
    message = rf'{key}.*0\.3.*ignore=\["{key}"\]'
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        GenerationConfig.from_files({key: 0.3}, {})
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        GenerationConfig.from_files(None, {key: 0.3})
    assert GenerationConfig.from_files({key: 0.3}, {}, ignore=[key]) == from_file()


def test_unknown_keys_of_generation_config_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"novelty.*3.*odd.*'a'.*ignore=\[.novelty., .odd.\]"):
        GenerationConfig.from_files({"novelty": 3, "odd": "a", "nothing": None, "empty": []}, {})
    assert GenerationConfig.from_files(None, {"novelty": 3}) == from_file()  # in config.json it is the model's affair


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_what_changes_no_text_is_passed_over(key: str) -> None:
    assert GenerationConfig.from_files({key: 17}, {}) == from_file()


def test_every_key_that_is_read_can_be_ignored() -> None:
    strange: dict[str, Any] = dict.fromkeys(READ, "strange")
    assert GenerationConfig.from_files(strange, {}, ignore=READ) == from_file()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids.*\[3, 4\].*ignore="),
        ({"bad_words_ids": [3]}, r"bad_words_ids.*list"),
        ({"suppress_tokens": 3}, r"suppress_tokens.*list"),
        ({"decoder_start_token_id": [1, 2]}, r"decoder_start_token_id.*\[1, 2\]"),
        ({"pad_token_id": True}, r"pad_token_id.*True"),
        ({"num_beams": 2**31}, r"num_beams.*2147483648.*1000"),
        ({"pad_token_id": 10**30}, r"pad_token_id.*1000"),  # which no tensor holds
        ({"max_length": "20"}, r"max_length.*str"),
        ({"max_new_tokens": 0}, r"max_new_tokens.*1.*0"),
        ({"num_beams": 0}, r"beams.*1.*0"),
        ({"early_stopping": "soon"}, r"early_stopping.*True.*False.*'never'.*'soon'"),
        ({"eos_token_id": "2"}, "eos"),
        ({"stop_strings": [""]}, "stop"),
        ({"do_sample": "false"}, r"do_sample.*false.*'false'"),
        ({"do_sample": 0}, r"do_sample.*0"),
        ({"eos_token_id": [[0]]}, r"eos.*\[0\]"),
        ({"suppress_tokens": [[3]]}, r"bad_words_ids.*suppress_tokens.*\[3\]"),
        ({"bad_words_ids": [[True]]}, r"bad_words_ids.*suppress_tokens.*True"),
        ({"length_penalty": "1"}, r"length_penalty.*'1'"),
        ({"min_new_tokens": 1.5}, r"min_new_tokens.*float.*1.5"),
        ({"no_repeat_ngram_size": -1}, r"no_repeat_ngram_size.*0.*-1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"do_sample": True, "temperature": -1.0}, r"temperature.*0"),
        ({"do_sample": True, "top_p": "0.9"}, r"top_p.*str.*'0.9'"),
    ],
)
def test_value_that_cannot_be_used_is_refused_with_its_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        GenerationConfig.from_files(values, {})


@pytest.mark.parametrize("key", ["eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"])
def test_token_beyond_the_vocabulary_is_refused_with_its_key(key: str) -> None:
    said = GenerationConfig.from_files({key: [31] if key == "suppress_tokens" else 31}, {})
    said.check_tokens(32)
    message = rf'generation_config\.json.*{key}.*token.*31.*0.*30.*ignore=\["{key}"\]'
    with pytest.raises(ValueError, match=message):
        said.check_tokens(31)


def test_file_that_a_token_was_read_from_is_named() -> None:
    for generation in (None, {}, {"eos_token_id": None}):
        with pytest.raises(ValueError, match=r"config\.json.*eos_token_id.*token.*31"):
            GenerationConfig.from_files(generation, {"eos_token_id": 31}).check_tokens(31)
    both = GenerationConfig.from_files({"num_beams": 2}, {"eos_token_id": 31})
    assert both.sources == {"num_beams": "generation_config.json", "eos_token_id": "config.json"}


def test_keys_to_ignore_are_a_list():
    with pytest.raises(TypeError, match=r"ignore.*str.*ignore=\['typical_p'\]"):
        GenerationConfig.from_files({"typical_p": 0.9}, {}, ignore="typical_p")
