"""Steps of training stages: which stage a step has, and its tokens."""

import random

from tests.seeds import seeds
from titanlite.data.steps import BatchStage, stage_index, steps_of_stages, steps_until, tokens_until


@seeds(10, 200)
def test_steps_and_tokens_of_stages(seeds: range) -> None:
    for seed in seeds:
        check(random.Random(seed))


def check(rng: random.Random) -> None:
    starts = [1, *sorted(rng.sample(range(2, 30), rng.randrange(4)))]
    stages = [BatchStage(start, rng.randrange(1, 5), rng.randrange(1, 9)) for start in starts]
    owners = [max(n for n, start in enumerate(starts) if start <= step) for step in range(1, 41)]
    assert [stage_index(stages, step) for step in range(1, 41)] == owners
    for step in range(41):
        assert steps_of_stages(stages, step) == [owners[:step].count(n) for n in range(len(stages))]
        assert tokens_until(stages, step) == sum(stages[owner].tokens for owner in owners[:step])
    for tokens in range(tokens_until(stages, 40) + 1):
        assert steps_until(stages, tokens) == next(n for n in range(41) if tokens_until(stages, n) >= tokens)
