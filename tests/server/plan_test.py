# SPDX-License-Identifier: Apache-2.0
import pytest

from kvferry.engine.request import BootstrapInfo
from kvferry.engine.sampling_params import SamplingParams
from kvferry.server.errors import ApiError
from kvferry.server.plan import SequencePlan, count_samples, with_meetings, with_samples


def _plan(name: str, seed: int | None = None) -> SequencePlan:
    return SequencePlan(public_id=name, prompt_ids=(1,), params=SamplingParams(seed=seed))


def test_count_samples() -> None:
    assert count_samples(None, 3, 4) == 1
    assert count_samples(2.0, 2, 4) == 2


@pytest.mark.parametrize(
    ("n", "prompts", "message"),
    [
        (0, 1, "n must be at least 1, is 0"),
        (-3, 1, "n must be at least 1, is -3"),
        (1.5, 1, "n must be a whole number"),
        (3, 2, "2 prompts with n=3 are 6 sequences; one request may ask for 4"),
        (None, 5, "5 prompts with n=1 are 5 sequences"),
    ],
)
def test_count_samples_refuses(n: float | None, prompts: int, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        count_samples(n, prompts, 4)


def test_one_sample_keeps_the_id() -> None:
    assert [plan.public_id for plan in with_samples([_plan("a"), _plan("b")], 1)] == ["a", "b"]


def test_samples_have_ids_and_seeds_of_their_own() -> None:
    plans = with_samples([_plan("a", seed=7), _plan("b")], 2)
    assert [plan.public_id for plan in plans] == ["a_0", "a_1", "b_0", "b_1"]
    assert [plan.params.seed for plan in plans] == [7, 8, None, None]


def test_the_largest_seed_wraps() -> None:
    plans = with_samples([_plan("a", seed=2**64 - 1)], 2)
    assert [plan.params.seed for plan in plans] == [2**64 - 1, 0]


def test_with_meetings() -> None:
    meetings = [BootstrapInfo("h", 1, 5), BootstrapInfo("h", 1, 6)]
    plans = with_meetings([_plan("a"), _plan("b")], meetings)
    assert [plan.bootstrap for plan in plans] == meetings
