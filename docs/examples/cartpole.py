"""Learn CartPole off-policy from a lake, while workers write to it: python docs/examples/cartpole.py ./lake

Workers are processes of their own. They play with the newest policy that they find and record each episode with its
log-probabilities. The trainer draws recent episodes seconds after their end, at a bounded ratio of samples to inserts,
corrects for the age of their policy, and now and then compacts the lake without stopping. It ends when the mean return
of 20 episodes with the newest policy reaches 195, CartPole's mark for being solved.

The policy is linear (ten numbers); the update is the clipped objective of PPO (Schulman et al. 2017) on normalised
returns, by hand in numpy. What matters here is the way of the data: swap in your own model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np

import trajlake
from trajlake.read.batch import Batch
from trajlake.read.flow import SampleToInsertRatio
from trajlake_pipelines.compact import compact

SOLVED = 195.0
DISCOUNT, CLIP, LEARNING_RATE = 0.98, 0.2, 0.03
BATCH, PASSES = 16, 4  # episodes drawn for an update, and steps of the optimiser on them
PER_POLICY = 8  # episodes that a worker plays with one policy: fewer than the trainer waits for would stop both


def probabilities(weights: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """Of each action; observations have shape (…, 4), weights (5, 2)."""
    logits = observations @ weights[:4] + weights[4]
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


# -- a worker ------------------------------------------------------------------------------------------------------


def work(lake_uri: str, policies: Path, number: int) -> None:
    """Play and record until the trainer says that it is done."""
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(number)
    with trajlake.connect(lake_uri).writer("cartpole", f"w{number}", segment_seconds=1.0) as writer:
        played: Counter[Path] = Counter()
        while not (policies / "done").exists():
            newest = max(policies.glob("*.npy"))
            if played[newest] == PER_POLICY:  # what is recorded is kept, so it is the worker that waits for the trainer
                time.sleep(0.02)
                continue
            played[newest] += 1
            weights = np.load(newest)
            seed = int(rng.integers(2**31))
            with writer.episode(env_name="CartPole-v1", seed=seed, policy_version=str(int(newest.stem))) as episode:
                observation, _ = env.reset(seed=seed)
                total, over = 0.0, False
                while not over:
                    chances = probabilities(weights, observation)
                    action = int(rng.random() < chances[1])
                    seen = observation
                    observation, reward, terminated, truncated, _ = env.step(action)
                    over = terminated or truncated
                    total += float(reward)
                    episode.step(
                        observation=seen,
                        action=np.int64(action),
                        tensors={"action_logprob": np.float64(np.log(chances[action]))},
                        reward=float(reward),
                        terminated=terminated,
                        truncated=truncated,
                    )
                episode.end(reward=total, success=total >= SOLVED)


# -- the trainer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experience:
    """A batch as arrays of shape (episodes, steps, …); `before` are the log-probabilities with which workers acted."""

    observations: np.ndarray
    actions: np.ndarray
    before: np.ndarray
    advantages: np.ndarray
    valid: np.ndarray


def experience(batch: Batch) -> Experience:
    """The batch with its discounted returns, normalised, as advantages."""
    rewards, valid = batch.array("reward"), batch.valid
    returns = np.zeros_like(rewards)
    ahead = np.zeros(len(rewards))
    for step in reversed(range(rewards.shape[1])):
        ahead = rewards[:, step] + DISCOUNT * ahead
        returns[:, step] = ahead
    known = returns[valid]
    advantages = (returns - known.mean()) / (known.std() + 1e-8)
    arrays = [batch.array(name) for name in ("observation", "action", "action_logprob")]
    return Experience(*arrays, advantages, valid)


def gradient(weights: np.ndarray, seen: Experience) -> np.ndarray:
    """Of PPO's clipped objective."""
    chances = probabilities(weights, seen.observations)
    taken = np.take_along_axis(chances, seen.actions[..., None], axis=-1)[..., 0]
    ratio = taken / np.exp(seen.before)
    clipped = np.where(seen.advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    scale = np.where(seen.valid & ~clipped, ratio * seen.advantages, 0.0) / seen.valid.sum()
    by_logit = scale[..., None] * (np.eye(2)[seen.actions] - chances)
    inputs = np.concatenate([seen.observations, np.ones((*seen.observations.shape[:-1], 1))], axis=-1)
    return np.einsum("btf,bta->fa", inputs, by_logit)


class Adam:
    """Kingma & Ba 2015."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.square, self.step = np.zeros(shape), np.zeros(shape), 0

    def change(self, gradient: np.ndarray) -> np.ndarray:
        self.step += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.step)
        return LEARNING_RATE * mean / (np.sqrt(self.square / (1 - 0.999**self.step)) + 1e-8)


def evaluate(weights: np.ndarray, episodes: int = 20) -> float:
    """The mean return of fresh episodes."""
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(1)
    total = 0.0
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            action = int(rng.random() < probabilities(weights, observation)[1])
            observation, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            total += float(reward)
    return total / episodes


def train(lake: trajlake.Lake, policies: Path, seconds: float) -> float:
    """Train until solved or until time is up; the mean return that was reached."""
    weights, adam, began = np.zeros((5, 2)), Adam((5, 2)), time.monotonic()
    publish(policies, 0, weights)
    sampler = lake.sampler(
        "recency",
        live=True,
        max_lag=8,  # of updates
        half_life=4,
        limiter=SampleToInsertRatio(samples_per_insert=8.0, min_size_to_sample=PER_POLICY, error_buffer=8.0 * BATCH),
        poll_seconds=0.5,
    )
    reached, update = 0.0, 0
    while reached < SOLVED and time.monotonic() - began < seconds:
        batch = sampler.batch(BATCH, timeout=60)
        seen = experience(batch)
        for _ in range(PASSES):
            weights = weights + adam.change(gradient(weights, seen))
        update += 1
        publish(policies, update, weights)
        if update % 10 == 0:
            reached = evaluate(weights)
            lags = [sample.policy_lag or 0.0 for sample in batch.samples]
            print(
                f"{time.monotonic() - began:4.0f} s, update {update}: mean return {reached:.0f}; "
                f"{sampler.inserts} episodes, {sampler.samples} samples, mean policy lag {np.mean(lags):.1f}",
                flush=True,
            )
        if update % 40 == 0:
            report = compact(lake)
            print(f"       compacted {report.episodes} episodes, training goes on", flush=True)
    return reached


def publish(policies: Path, version: int, weights: np.ndarray) -> None:
    """Put a policy where the workers find it, whole or not at all."""
    temporary = policies / "next"
    with temporary.open("wb") as file:
        np.save(file, weights)
    temporary.rename(policies / f"{version:08d}.npy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lake", help="an address where there is no lake yet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="give up after so long")
    parser.add_argument("--as-worker", nargs=2, metavar=("POLICIES", "NUMBER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_worker:
        work(given.lake, Path(given.as_worker[0]), int(given.as_worker[1]))
        return
    lake = trajlake.create(given.lake)
    with tempfile.TemporaryDirectory() as folder:
        policies = Path(folder)
        publish(policies, 0, np.zeros((5, 2)))
        command = [sys.executable, __file__, given.lake, "--as-worker", folder]
        workers = [subprocess.Popen([*command, str(number)]) for number in range(given.workers)]
        try:
            reached = train(lake, policies, given.seconds)
        finally:
            (policies / "done").touch()
            for worker in workers:
                worker.wait(60)
    print(f"mean return {reached:.0f}: {'solved' if reached >= SOLVED else 'not solved'}")
    sys.exit(0 if reached >= SOLVED else 1)


if __name__ == "__main__":
    main()
