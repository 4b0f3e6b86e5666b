"""Scores of tasks, by closed forms."""

import math

import pytest

from titanlite.metrics.scores import score_choices, score_cloze


def test_a_choice_is_the_most_likely_one_in_total_and_per_character() -> None:
    """é is one character and two bytes: per byte, the other choice of the second question would be the better one."""
    sums = [[-1.0, -9.0], [-4.0, -3.6], [-2.0, -2.0]]
    choices = [["a", "abcdefghijkl"], ["abcde", "éééé"], ["no", "yes"]]
    found = score_choices(sums, choices, [0, 0, 0], num_truncated=2)
    # In total: 0, 1 and, of equal ones, the first. Per character: -1 and -0.75; -0.8 and -0.9; -1 and -0.67.
    assert found.numbers == {
        "acc": pytest.approx(2 / 3),
        "acc_stderr": pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3)),
        "acc_norm": pytest.approx(1 / 3),
        "acc_norm_stderr": pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3)),
    }
    assert (found.num_questions, found.num_truncated, found.log_likelihoods) == (3, 2, tuple(map(tuple, sums)))
    assert found.describe() == "acc 66.7% ± 33.3%, acc_norm 33.3% ± 33.3%"
    ties = score_choices([[-2.0, -4.0], [-4.0, -2.0]], [["a", "bb"], ["aa", "b"]], [0, 0])
    assert ties.numbers["acc_norm"] == 1.0


def test_perplexity_of_a_cloze_is_per_answer() -> None:
    sums = [-math.log(2), -math.log(32), -math.log(8)]
    found = score_cloze(sums, [True, False, False])
    spread = math.log(4) / math.sqrt(3)
    assert found.numbers == pytest.approx(
        {"acc": 1 / 3, "acc_stderr": 1 / 3, "perplexity": 8.0, "perplexity_stderr": 8 * spread}
    )
    assert found.describe() == "acc 33.3% ± 33.3%, perplexity 8 ± 6.403"


def test_one_question_has_no_error_and_an_unlikely_answer_no_overflow() -> None:
    assert score_cloze([-5000.0], [False]).numbers == {"acc": 0.0, "perplexity": math.inf}
    assert score_choices([[-1.0, -2.0]], [["a", "b"]], [1]).describe() == "acc 0.0%, acc_norm 0.0%"
