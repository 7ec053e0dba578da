"""Episodes of the shape that real tool-using rollouts have, made from a seed; and the real tau-bench ones.

What a store sees of such data is its sizes and its redundancy, so both are modelled: a system prompt a domain that
every episode repeats, tasks that several trials share, records that tools return again and again, text whose words
and phrases follow Zipf's law, identifiers and numbers that do not compress, tool results with a heavy tail, token
ids that follow from the text, log-probabilities by a log-softmax in float32. `python -m tests.benchmarks.data` prints
how the result compares with the real file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
TRIALS = 4
TOKEN_VOCABULARY = 128_256
_POOL = 1 << 16


@dataclass(frozen=True)
class Rollout:
    """One episode as a worker would record it: fields of begin, steps, and end of `trajlake.Writer`."""

    episode_id: str
    begin: dict[str, Any]
    steps: list[dict[str, Any]]
    end: dict[str, Any] = field(default_factory=dict)


def realdata() -> Path | None:
    """The folder of other projects' trajectories, where it is."""
    folder = Path(os.environ.get("TRAJLAKE_REALDATA", REPOSITORY.parent / "shared" / "realdata"))
    return folder if folder.is_dir() else None


def rollouts(count: int, seed: int = 0, hardest: bool = False) -> Iterator[Rollout]:
    """`count` made-up episodes, one at a time: TRIALS a task, tasks of two domains in turn. `hardest` is the
    worst that a store can be given: all bits of log-probabilities are random, and token ids follow from nothing."""
    world = _World(np.random.default_rng(seed), hardest)
    for number in range(count):
        yield world.rollout(number)


def tau_bench() -> Iterator[Rollout]:
    """The 200 episodes of gpt-4o on tau-bench's airline domain, where the real data is there; else none."""
    folder = realdata()
    path = folder and folder / "tau-bench" / "historical_trajectories" / "gpt-4o-airline.json"
    if not path or not path.is_file():
        return
    for row in json.loads(path.read_text()):
        steps = [_real_step(message) for message in row["traj"]]
        begin = {"task_family": "tau-bench", "domain": "airline", "task_id": row["task_id"], "trial": row["trial"]}
        identity = f"tau-{row['task_id']:04d}-{row['trial']}"
        yield Rollout(identity, begin, steps, {"reward": row["reward"], "success": row["reward"] == 1.0})


def _real_step(message: dict[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        result = {"call_id": message.get("tool_call_id"), "content": content, "is_error": content.startswith("Error")}
        return {"source": "tool", "tool_results": [result]}
    step: dict[str, Any] = {"source": "agent" if role == "assistant" else role}
    if content is not None:
        step["message"] = content
    if message.get("tool_calls"):
        step["tool_calls"] = message["tool_calls"]
    return step


def as_lists(rollout: Rollout) -> Rollout:
    """`rollout` with token ids and log-probabilities as lists of Python numbers, as inference servers give them."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    steps = [{name: plain(value) for name, value in step.items()} for step in rollout.steps]
    return Rollout(rollout.episode_id, rollout.begin, steps, rollout.end)


def log_probabilities(rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Of sampled tokens, as inference servers compute them: a log-softmax in float32 over logits in bfloat16, of the 16
    likeliest tokens and, as one mass, of the rest of the vocabulary. Half of the tokens are nearly certain, as after
    post-training; a sixth is exactly 0. No published file that we know has real ones to compare with."""
    certain = rng.random(count) < 0.5
    lead = np.where(certain, rng.gamma(4.0, 3.5, count), rng.exponential(1.6, count))  # over the next token
    behind = np.cumsum(rng.exponential(0.7, (count, 16)), axis=1) + (lead - 0.7)[:, None]
    behind[:, 0] = 0.0
    logits = _bfloat16(rng.normal(24.0, 3.0, (count, 1)) - np.maximum(behind, 0.0))
    shifted = logits - logits.max(axis=1, keepdims=True)
    rest = (TOKEN_VOCABULARY - 16) * np.exp(-lead - 14.0 - rng.gamma(2.0, 1.0, count))
    sums = np.exp(shifted).sum(axis=1, dtype=np.float32) + rest.astype(np.float32)
    found = shifted - np.log(sums)[:, None]
    ends = np.cumsum(np.exp(found.astype(np.float64)), axis=1)
    chosen = (rng.random(count)[:, None] * ends[:, -1:] > ends).sum(axis=1)
    return np.asarray(found[np.arange(count), chosen])


def _bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class _Words:
    """Text by Zipf's law: words in sentences, half of them within phrases that come again."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._items = np.array([*_vocabulary(), *self._phrases()], dtype=object)
        # Ranks of words first, then of phrases: half of the mass each.
        half = len(self._items) // 2
        weights = np.concatenate([_zipf(half, 1.05), _zipf(len(self._items) - half, 0.8)]) / 2
        self._sums = np.cumsum(weights)
        self._pool = np.empty(0, dtype=object)
        self._at = 0

    def _phrases(self) -> list[str]:
        words = np.array(_vocabulary(), dtype=object)
        weights = _zipf(len(words), 1.0)
        lengths = self._rng.integers(3, 9, len(words))
        chosen = iter(words[np.searchsorted(np.cumsum(weights), self._rng.random(lengths.sum()))])
        return [" ".join(next(chosen) for _ in range(length)) for length in lengths]

    def text(self, characters: int) -> str:
        """About `characters` characters in sentences."""
        count = max(2, round(characters / 17))
        if self._at + count > len(self._pool):
            size = max(_POOL, count)
            self._pool = self._items[np.searchsorted(self._sums, self._rng.random(size))]
            self._at = 0
        words = self._pool[self._at : self._at + count]
        self._at += count
        sentences = [" ".join(words[start : start + 8]).capitalize() for start in range(0, count, 8)]
        return ". ".join(sentences) + "."


class _Tokenizer:
    """Splits texts as byte-pair encodings do, into words of up to four letters with the space before them, up to three
    digits, and marks. Pieces are numbered as they first come, so that frequent ones have small ids, as theirs."""

    _PIECES = re.compile(r" ?[A-Za-z]{1,4}|[0-9]{1,3}|[^A-Za-z0-9]{1,3}")

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def ids(self, step: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Of what the policy wrote: its reasoning, message and tool calls."""
        calls = [f"{call['name']}{call['arguments']}" for call in step.get("tool_calls", ())]
        text = "\n\n".join([step.get("reasoning", ""), step.get("message", ""), *calls])
        known = self._ids
        return np.array([known.setdefault(piece, self._next) for piece in self._PIECES.findall(text)], np.int32)

    @property
    def _next(self) -> int:
        number = len(self._ids)
        return min(2 * number + number * number // 1_200, TOKEN_VOCABULARY - 1)


class _World:
    """The domains, their records, and the random state from which episodes are made in order."""

    def __init__(self, rng: np.random.Generator, hardest: bool) -> None:
        self._rng = rng
        self._hardest = hardest
        self._words = _Words(rng)
        self._domains = [_Domain(name, rng, self._words) for name in ("airline", "retail")]
        self._tokenizer = _Tokenizer()
        self._token_sums = np.cumsum(_zipf(TOKEN_VOCABULARY, 1.1))
        self._token_names = rng.permutation(TOKEN_VOCABULARY).astype(np.int32)
        self._logprobs = np.empty(0, np.float32)
        self._clock = 1_760_000_000.0
        self._task: tuple[int, str, list[str]] = (-1, "", [])

    def rollout(self, number: int) -> Rollout:
        rng = self._rng
        task, trial = divmod(number, TRIALS)
        domain = self._domains[task % len(self._domains)]
        if self._task[0] != task:
            wish = self._words.text(rng.lognormal(5.3, 0.5))
            self._task = (task, wish, [domain.record() for _ in range(4)])
        _, wish, records = self._task
        steps: list[dict[str, Any]] = [
            {"source": "system", "message": domain.prompt},
            {"source": "user", "message": wish},
        ]
        turns = int(np.clip(rng.lognormal(2.2, 0.45), 2, 60))
        for _ in range(turns):
            if rng.random() < 0.6:
                steps += self._tool_turn(domain, records)
            else:
                steps.append(self._agent_step(self._words.text(rng.lognormal(5.2, 0.8))))
                steps.append({"source": "user", "message": self._words.text(rng.lognormal(4.2, 0.7))})
        success = bool(rng.random() < 0.45)
        for step in steps:
            self._clock += float(rng.exponential(1.5))
            step["timestamp"] = self._clock
        begin = {
            "task_family": "made-up-tools", "domain": domain.name, "task_id": f"{domain.name}/{task}",
            "group_id": f"{domain.name}/{task}", "trial": trial, "seed": number, "policy_version": str(number // 1000),
        }  # fmt: skip
        return Rollout(f"{number:08x}{_hex(rng, 12)}", begin, steps, {"reward": float(success), "success": success})

    def _tool_turn(self, domain: _Domain, records: list[str]) -> list[dict[str, Any]]:
        rng = self._rng
        identity = f"call_{_hex(rng, 12)}"
        failed = rng.random() < 0.08
        if failed:
            content = f"Error: {self._words.text(60)}"
        elif rng.random() < 0.7:
            content = records[int(rng.integers(len(records)))]
        else:
            content = domain.record()
        arguments = {"user_id": f"{domain.word(self._rng)}_{rng.integers(10_000)}", domain.word(rng): domain.word(rng)}
        call = {"id": identity, "name": domain.tool(rng), "arguments": json.dumps(arguments)}
        step = self._agent_step(None, call)
        result = {"call_id": identity, "content": content, "is_error": bool(failed)}
        return [step, {"source": "tool", "tool_results": [result], "latency_ms": float(rng.lognormal(4.0, 1.0))}]

    def _agent_step(self, message: str | None, call: dict[str, str] | None = None) -> dict[str, Any]:
        """What the policy says or calls after some reasoning (heavy tail), with the tokens of all that."""
        rng = self._rng
        step: dict[str, Any] = {"source": "agent"}
        if rng.random() < 0.5:
            step["reasoning"] = self._words.text(min(20_000.0, rng.lognormal(5.8, 1.0)))
        if message is not None:
            step["message"] = message
        if call is not None:
            step["tool_calls"] = [call]
        step["token_ids"] = self._tokenizer.ids(step)
        length = len(step["token_ids"])
        if self._hardest:
            drawn = np.searchsorted(self._token_sums, rng.random(length)).clip(max=TOKEN_VOCABULARY - 1)
            step["token_ids"] = self._token_names[drawn]
            step["logprobs"] = -rng.gamma(0.25, 0.9, length).astype(np.float32)
        else:
            if len(self._logprobs) < length:
                self._logprobs = log_probabilities(rng, 1 << 15)
            step["logprobs"], self._logprobs = self._logprobs[:length].copy(), self._logprobs[length:]
        step["completion_tokens"] = length
        step["prompt_tokens"] = int(rng.integers(2_000, 12_000))
        step["latency_ms"] = float(rng.lognormal(7.0, 0.5))
        step["model"] = "policy-7b"
        return step


class _Domain:
    """A system prompt, tools, and the records that the tools return."""

    def __init__(self, name: str, rng: np.random.Generator, words: _Words) -> None:
        self.name = name
        self.prompt = "\n\n".join(f"# {words.text(30)}\n{words.text(700)}" for _ in range(8))
        self._rng = rng
        self._keys = [_vocabulary()[int(rng.integers(200, 2_000))] for _ in range(60)]
        self._tools = [f"{self.word(rng)}_{self.word(rng)}" for _ in range(14)]
        self._words = words

    def word(self, rng: np.random.Generator) -> str:
        return self._keys[int(rng.integers(len(self._keys)))]

    def tool(self, rng: np.random.Generator) -> str:
        return self._tools[int(rng.integers(len(self._tools)))]

    def record(self) -> str:
        """A database row as JSON, a page of text, or (rarely) a long dump."""
        rng = self._rng
        size = min(60_000.0, rng.lognormal(6.3, 0.9))
        if rng.random() < 0.15:
            return self._words.text(size)
        rows = []
        used = 0
        while used < size:
            row: dict[str, Any] = {"id": _hex(rng, 8), "price": round(float(rng.gamma(2.0, 90.0)), 2)}
            for _ in range(5):
                row[self.word(rng)] = int(rng.integers(10_000)) if rng.random() < 0.4 else self._words.text(25)
            rows.append(row)
            used += 190
        return json.dumps({"status": "available", self.word(rng): rows})


@cache
def _vocabulary() -> tuple[str, ...]:
    """12,000 made-up words, the frequent ones short."""
    rng = np.random.default_rng(7)
    starts = ["", *"bcdfghlmnprstv", "br", "ch", "fl", "pr", "st", "tr"]
    middles = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
    ends = ["", "", "n", "r", "s", "t", "l", "d", "ng", "st"]
    words: dict[str, None] = {}
    while len(words) < 12_000:
        syllables = 1 + (len(words) > 150) + (len(words) > 3_000) + int(rng.random() < 0.3)
        parts = rng.random((syllables, 3))
        words[
            "".join(
                kind[int(x * len(kind))] for row in parts for x, kind in zip(row, (starts, middles, ends), strict=True)
            )
        ] = None
    return tuple(words)


def _zipf(count: int, exponent: float) -> np.ndarray[Any, Any]:
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()


def _hex(rng: np.random.Generator, digits: int) -> str:
    return rng.bytes((digits + 1) // 2).hex()[:digits]


def _describe(name: str, episodes: list[Rollout]) -> None:
    import pyarrow as pa

    def shown(step: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in step.items() if not isinstance(value, np.ndarray)}

    texts = [json.dumps([shown(step) for step in rollout.steps]).encode() for rollout in episodes]
    zstd = pa.Codec("zstd", compression_level=3)
    alone = np.mean([len(text) / zstd.compress(text).size for text in texts])
    together = sum(map(len, texts)) / zstd.compress(b"".join(texts)).size
    steps = [step for rollout in episodes for step in rollout.steps]
    results = [len(step["tool_results"][0]["content"]) for step in steps if "tool_results" in step]
    tokens = [len(step["token_ids"]) for step in steps if "token_ids" in step] or [0]
    print(
        f"{name}: {len(episodes)} episodes, {len(steps) / len(episodes):.1f} steps and "
        f"{np.mean([len(text) for text in texts]):,.0f} bytes of JSON each (without tokens); tool results p50 "
        f"{np.percentile(results, 50):,.0f}, p95 {np.percentile(results, 95):,.0f}, max {max(results):,} characters; "
        f"{np.mean(tokens):.0f} tokens an agent step; zstd -3 makes an episode alone {alone:.1f} times smaller, "
        f"all together {together:.1f} times"
    )


if __name__ == "__main__":
    import time

    if real := list(tau_bench()):
        _describe("tau-bench", real)
    began = time.perf_counter()
    made = list(rollouts(200))
    seconds = time.perf_counter() - began
    _describe("made up", made)
    print(f"{200 / seconds:.0f} made-up episodes a second")
