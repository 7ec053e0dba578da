"""The demo's classic RL: the same seed gives the same episode, and its flags are Gymnasium's."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from trajlake.errors import UsageError

gymnasium = pytest.importorskip("gymnasium")

from trajlake.demo import gym  # noqa: E402

pytestmark = pytest.mark.unit


def played(assignment):
    steps = []
    play = assignment.play()
    while True:
        try:
            steps.append(next(play))
        except StopIteration as end:
            return [{name: value for name, value in step.items() if name != "latency_ms"} for step in steps], end.value


@pytest.mark.parametrize("source", [gym.cartpole, gym.frozenlake])
def test_the_same_seed_plays_the_same_episode(source):
    for one, other in zip(source(4), source(4), strict=True):
        assert one.begin == other.begin
        np.testing.assert_equal(played(one), played(other))


def test_cartpole_is_what_gymnasium_says():
    """Replaying the recorded actions in a fresh environment gives the recorded observations, rewards and flags."""
    env = gymnasium.make("CartPole-v1")
    for assignment in gym.cartpole(6):
        steps, outcome = played(assignment)
        observation, _ = env.reset(seed=assignment.begin["seed"])
        for step in steps:
            np.testing.assert_array_equal(step["observation"], observation)
            assert (step["observation"].dtype, step["observation"].shape) == (np.float32, (4,))
            assert (step["action"].dtype, step["action"].shape) == (np.int64, ())
            observation, reward, terminated, truncated, _ = env.step(int(step["action"]))
            assert (step["reward"], step["terminated"], step["truncated"]) == (reward, terminated, truncated)
        np.testing.assert_array_equal(steps[-1]["tensors"]["final_observation"], observation)
        assert outcome["reward"] == len(steps)
        assert outcome["success"] is (outcome["truncated"] and not outcome["terminated"]) is (len(steps) == 500)


def test_both_ends_of_cartpole_occur():
    outcomes = [played(assignment)[1] for assignment in gym.cartpole(16)]
    assert {(outcome["terminated"], outcome["truncated"]) for outcome in outcomes} == {(True, False), (False, True)}


def test_the_log_probability_is_that_of_the_policy():
    steps, _ = played(gym.cartpole(1)[0])
    assert gym.cartpole(1)[0].begin["policy_version"] == "random"
    assert {step["tensors"]["action_logprob"] for step in steps} == {np.float32(np.log(0.5))}
    explored = {round(float(np.exp(step["tensors"]["action_logprob"])), 3) for step in played(gym.cartpole(2)[1])[0]}
    assert explored == {0.95, 0.05}


def test_frozenlake_ends_in_the_goal_a_hole_or_at_the_limit():
    for assignment in gym.frozenlake(40):
        steps, outcome = played(assignment)
        last = steps[-1]
        assert int(last["tensors"]["final_observation"]) in (
            {15} if outcome["success"] else {5, 7, 11, 12} | set(range(15))
        )
        assert outcome["reward"] == sum(step["reward"] for step in steps) == float(outcome["success"])
        assert outcome["stop_reason"] == (
            "goal" if outcome["success"] else "hole" if outcome["terminated"] else "time limit"
        )
        assert (
            outcome.get("failure_stage")
            == {"goal": None, "hole": "other", "time limit": "budget"}[outcome["stop_reason"]]
        )


def test_value_iteration_finds_the_better_policy():
    best = gym.solve(gymnasium.make("FrozenLake-v1", is_slippery=False).unwrapped.P)
    state, steps = 0, 0
    table = gymnasium.make("FrozenLake-v1", is_slippery=False).unwrapped.P
    while state != 15:
        ((_, state, _, _),) = table[state][int(best[state])]
        steps += 1
    assert steps == 6  # the shortest way


def test_without_gymnasium_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'trajlake\[demo\]'"):
        gym.require_gymnasium()
