"""Some of the cases of tests/fuzz/run.py, which `make fuzz` runs many more of: damaged files open or are refused."""

import pytest
from fuzz.corpus import write_corpus
from fuzz.run import KINDS, run_case

SEED, EACH = 14, 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("fuzz") / "corpus")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_opened_or_refused_on_purpose_and_no_number_changes_in_silence(corpus, kind, capfd):
    found = [run_case(corpus, SEED, KINDS.index(kind) + len(KINDS) * n, limited=False) for n in range(EACH)]
    wrong = [(case.words, case.problem) for case in found if case.problem is not None]
    assert wrong == []
    assert 0 < sum(case.opened for case in found) < EACH  # damage that does nothing, or always the same, finds nothing
