"""Live sampling: an episode is drawn seconds after its end, once, before and after compaction; flow control."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.rollouts import record, record_episode

import trajlake
from trajlake.errors import QueryError, UsageError
from trajlake.read.flow import MinSize, SampleToInsertRatio
from trajlake.read.landing import LandingTail
from trajlake.read.trajectory import restored
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(tmp_path):
    return trajlake.create(tmp_path / "lake")


def live(lake, strategy="fifo", **choices):
    return lake.sampler(strategy, live=True, **{"poll_seconds": 0.0, "table_seconds": 0.0, **choices})


def ids(samples):
    return [sample.episode_id for sample in samples]


def test_an_episode_is_drawn_seconds_after_its_end_before_any_compaction(lake_uri):
    """Five, with what writer and sampler do by themselves; a machine that does much else gets more."""
    lake = trajlake.create(lake_uri)
    drawn = lake.sampler("fifo", live=True)
    with lake.writer(run="run", worker="w") as writer:
        for number in range(3):
            record_episode(writer, number)
            ended = time.monotonic()
            batch = drawn.batch(1, timeout=60)
            assert time.monotonic() - ended < 20.0
            assert batch[0].episode_id == f"e{number:04d}"
            assert [step["message"] for step in batch[0].steps] == [f"step {number}/{step}" for step in range(3)]


def eventually(look, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, "it was not seen in time"
        time.sleep(0.1)
    return found


def test_scores_and_retractions_are_seen_seconds_after_they_were_given(lake_uri):
    """Of episodes in landing and in the tables, with what writer and sampler do by themselves."""
    lake = trajlake.create(lake_uri)
    record(lake, range(2))
    compact(lake)
    record(lake, range(2, 4), worker="x")
    drawn = lake.sampler("uniform", live=True)
    assert set(ids(drawn.take(100))) == {f"e{number:04d}" for number in range(4)}
    with lake.scores("run") as scores:
        for number in range(4):
            scores.add(f"e{number:04d}", "judge", number / 10, kind="judged")
            scores.add(f"e{number:04d}", "reward", 10.0 + number)

        def scored():
            return {sample.episode_id: sample.reward for sample in drawn.take(100)}

        eventually(lambda: min(scored().values()) >= 10.0)
        assert scored() == {f"e{number:04d}": 10.0 + number for number in range(4)}
        batch = drawn.batch(50)
        assert {each.episode["rewards"][0]["name"] for each in batch} == {"judge"}
        assert all(each.episode["reward"] == 10 + int(each.episode_id[1:]) for each in batch)
    lake.retract(["e0001", "e0002"], "leaked")
    eventually(lambda: set(ids(drawn.take(100))) == {"e0000", "e0003"})
    compact(lake)
    assert set(ids(lake.sampler("uniform", live=True).take(100))) == {"e0000", "e0003"}
    assert {sample.reward for sample in lake.sampler("uniform", live=True).take(100)} == {10.0, 13.0}


def test_late_scores_count_for_filters_and_as_priorities(lake):
    record(lake, range(3))
    compact(lake)
    record(lake, range(3, 6), worker="x")
    filtered = live(lake, "uniform", where="reward > 5")
    weighted = live(lake, "prioritized", priority="reward", alpha=1.0)
    assert len(set(ids(weighted.take(100)))) == 3
    with lake.scores("run") as scores:
        scores.add("e0001", "reward", 6.0)
        scores.add("e0004", "reward", 7.0)
    assert set(ids(filtered.take(50))) == {"e0001", "e0004"}
    assert Counter(ids(weighted.take(300))).most_common(1)[0][0] in {"e0001", "e0004"}


def test_a_late_score_is_corrected_by_a_later_one_through_compactions(lake):
    record(lake, [1])
    drawn = live(lake, "uniform")

    def reward():
        return drawn.batch(1)[0].episode["reward"]

    with lake.scores("run") as scores:
        scores.add("e0001", "reward", 2.0)
        scores.add("e0007", "reward", 3.0)  # which comes later
        scores.flush()
        assert reward() == 2.0
        compact(lake)
        assert reward() == 2.0
        scores.add("e0001", "reward", 4.0)
        scores.flush()
        assert reward() == 4.0
        compact(lake)
        assert reward() == 4.0
    record(lake, [7], worker="x")
    assert {sample.episode_id: sample.reward for sample in drawn.take(50)} == {"e0001": 4.0, "e0007": 3.0}


def test_a_discarded_episode_is_never_drawn(lake):
    drawn = live(lake)
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1, end=False).discard("the sandbox broke")
        record_episode(writer, 2)
    assert ids(drawn.take(1)) == ["e0002"]
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)


def test_what_landed_is_what_a_compaction_makes_of_it(lake):
    record(lake, range(4))
    with lake.writer(run="run", worker="x") as writer:
        with writer.episode(episode_id="odd", task_id=7, tags={"a": "b"}, extra={"x": 1}) as episode:
            episode.step(message="\ud800", tool_results=[{"call_id": "c", "content": "no", "is_error": True}])
            episode.step(message="more", prompt_tokens=3, cost_usd=0.5, token_ids=[1, 2], logprobs=[0.0])
            episode.end(reward=float("nan"), extra={"y": 2})
        record_episode(writer, 9, steps=0)
    tail = {each.row["episode_id"]: each for each in LandingTail(lake.store).poll().ended}
    compact(lake)
    snapshot = lake.snapshot()
    rows = {row["episode_id"]: row for row in snapshot.collect(snapshot.episodes).iter_rows(named=True)}
    assert rows.keys() == tail.keys()
    for episode_id, row in rows.items():
        for name, value in row.items():
            if name in {"steps_path", "row_group", "row_offset", "row_count", "duplicate_of"}:
                continue
            found = tail[episode_id].row[name]
            if name == "tags" and found:
                assert dict(found) == restored({"tags": value})["tags"]
                continue
            assert str(found) == str(value), (episode_id, name)
        (table,) = snapshot.steps_of(snapshot.rows_of([episode_id]))
        assert table.equals(tail[episode_id].steps) or str(table.to_pylist()) == str(tail[episode_id].steps.to_pylist())


def test_no_episode_comes_twice_or_never_whatever_is_compacted_meanwhile(lake):
    record(lake, range(5))
    compact(lake)
    record(lake, range(5, 10), worker="x")
    drawn = live(lake)
    seen = ids(drawn.take(7))
    compact(lake)
    record(lake, range(10, 13), worker="y")
    seen += ids(drawn.take(4))
    compact(lake)
    batch = drawn.batch(2)
    seen += [trajectory.episode_id for trajectory in batch]
    assert Counter(seen) == Counter(f"e{number:04d}" for number in range(13))
    with pytest.raises(TimeoutError, match="there are 13 episodes, 13 samples were drawn"):
        drawn.take(1, timeout=0.1)


def test_an_end_does_not_overtake_its_steps(lake):
    with lake.writer(run="run", worker="w") as writer:
        episode = writer.episode(episode_id="late")
        episode.step(message="first")
        writer.flush()
        episode.step(message="second")
        episode.end(reward=1.0)
    first, second = sorted(info.key for info in lake.store.list("landing/") if info.key.endswith(".arrow"))
    data = lake.store.get(first)
    lake.store.delete(first)
    drawn = live(lake)
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)
    lake.store.put_if_absent(first, data)
    assert [step["message"] for step in drawn.batch(1)[0].steps] == ["first", "second"]
    assert second


def test_a_resent_episode_takes_the_place_of_the_first(lake):
    record(lake, [1], message="old")
    drawn = live(lake, "uniform")
    assert drawn.batch(1)[0].steps[0]["message"] == "old 1/0"
    record(lake, [1], worker="x", attempt=1, message="new")
    assert drawn.batch(1)[0].steps[0]["message"] == "new 1/0"
    compact(lake)
    assert drawn.batch(1)[0].steps[0]["message"] == "new 1/0"
    assert drawn.inserts == 1


def test_a_resumed_trainer_repeats_nothing_and_misses_nothing(lake):
    record(lake, range(6))
    first = live(lake)
    seen = ids(first.take(4))
    state = json.loads(json.dumps(first.state_dict()))
    compact(lake)
    record(lake, range(6, 8), worker="x")
    second = live(lake)
    second.load_state_dict(state)
    for damage in ({"samples": None}, {"times_sampled": 3}):
        with pytest.raises(UsageError, match="the state is damaged"):
            second.load_state_dict({**state, "generation": 0, **damage})
    seen += ids(second.take(4))
    assert sorted(seen) == [f"e{number:04d}" for number in range(8)]
    with pytest.raises(UsageError, match="of another sampler"):
        live(lake, seed=3).load_state_dict(state)


def test_filters_and_strategies_hold_for_what_landed_too(lake):
    record(lake, range(6))
    compact(lake)
    record(lake, range(6, 12), worker="x")
    assert {int(name[1:]) % 2 for name in ids(live(lake, "uniform", where="success").take(60))} == {1}
    drawn = live(lake, "prioritized", priority="n_steps", alpha=1.0)
    samples = drawn.take(30)
    drawn.update_priorities(samples, [0.0] * 30)
    left = set(ids(drawn.take(100))) if len(set(ids(samples))) < 12 else set()
    assert not left & set(ids(samples))
    record(lake, [20, 21], worker="y")
    samples = drawn.take(200)
    assert {"e0020", "e0021"} <= set(ids(samples))
    assert max(sample.times_sampled for sample in samples) > 1
    for wrong in ({"strategy": "epochs"}, {"strategy": "uniform", "rank": 1}, {"strategy": "uniform", "nonsense": 1}):
        with pytest.raises(UsageError):
            live(lake, **wrong)
    with pytest.raises(QueryError):
        live(lake, where="nope = 1").take(1, timeout=1)
    with pytest.raises(UsageError, match="negative"):
        live(lake, "prioritized", priority="-1.0 - n_steps").take(1, timeout=1)


@pytest.mark.parametrize("wrong", [[float("nan"), 1.0], [-1.0, 1.0], [1.0], [1.0, "high"]])
def test_an_update_of_priorities_that_is_refused_changes_nothing(lake, wrong):
    record(lake, range(4))
    drawn = live(lake, "prioritized", priority="n_steps")
    samples = drawn.take(2)
    before = drawn.state_dict()
    with pytest.raises(UsageError, match="priorities"):
        drawn.update_priorities(samples, wrong)
    assert drawn.state_dict() == before
    record(lake, [4], worker="x")
    assert len(drawn.take(5, timeout=60)) == 5


@pytest.mark.parametrize("strategy", ["uniform", "fifo", "prioritized"])
@pytest.mark.parametrize(("most", "sizes"), [(2, [4, 4, 4, 8]), (3, [20, 10]), (3, [30]), (2, [9, 9, 2])])
def test_every_episode_comes_as_often_as_it_may_however_draws_are_cut(lake, strategy, most, sizes):
    record(lake, range(10))
    options = {"priority": "1 + reward"} if strategy == "prioritized" else {}
    drawn = live(lake, strategy, max_times_sampled=most, **options)
    batches = [drawn.batch(size, timeout=60) for size in sizes]
    samples = [sample for batch in batches for sample in batch.samples]
    assert [len(batch) for batch in batches] == sizes
    assert [sample.position for sample in samples] == list(range(sum(sizes)))
    assert Counter(ids(samples)) == {f"e{number:04d}": most for number in range(10)}
    for batch in batches:
        assert [each.episode_id for each in batch] == ids(batch.samples)
        assert batch.draws == len(batch)
        assert all(step["episode_id"] == each.episode_id for each in batch for step in each.steps)
    with pytest.raises(TimeoutError, match="0 can be drawn; left out: 10 drawn as often as they may be"):
        drawn.take(1, timeout=0.1)


def test_nothing_is_drawn_where_all_generations_have_too_little(lake):
    record(lake, range(5))
    drawn = live(lake, "uniform", max_times_sampled=2)
    assert len(drawn.take(3)) == 3
    before = drawn.state_dict()["times_sampled"]
    with pytest.raises(TimeoutError, match="3 samples were drawn, 7 can be drawn"):
        drawn.take(8, timeout=0.1)
    assert drawn.state_dict()["times_sampled"] == before
    resumed = live(lake, "uniform", max_times_sampled=2)
    resumed.load_state_dict(json.loads(json.dumps(drawn.state_dict())))
    assert set(Counter(ids(resumed.take(7, timeout=60))).values()) <= {1, 2}


def test_groups_are_drawn_again_after_all_of_them_were(lake):
    with lake.writer(run="run", worker="w") as writer:
        for number in range(6):
            with writer.episode(group_id=f"g{number // 2}") as episode:
                episode.step(message="x")
                episode.end(reward=float(number % 2))
    batch = live(lake, "group", max_times_sampled=2).batch(6, timeout=60)
    assert batch.draws == 6
    assert Counter(sample.group_id for sample in batch.samples) == {"g0": 4, "g1": 4, "g2": 4}
    assert Counter(sample.position for sample in batch.samples) == dict.fromkeys(range(6), 2)


def record_priorities(lake, priorities, worker):
    """An episode for each, with it as its reward."""
    with lake.writer(run="run", worker=worker) as writer:
        for number, priority in enumerate(priorities):
            with writer.episode(episode_id=f"{worker}{number}") as episode:
                episode.step(message="x")
                episode.end(reward=priority)


def test_what_has_priority_0_is_waited_for_and_not_counted(lake):
    record_priorities(lake, [0.0] * 2 + [1.0] * 8, "a")
    drawn = live(lake, "prioritized", max_times_sampled=1)
    with pytest.raises(TimeoutError, match=r"0 samples were drawn, 8 can be drawn"):
        drawn.take(10, timeout=0.1)
    assert len(set(ids(drawn.take(8)))) == 8
    with pytest.raises(TimeoutError, match=r"0 can be drawn"):
        drawn.take(1, timeout=0.1)
    record_priorities(lake, [2.0], "b")
    assert ids(drawn.take(1, timeout=60)) == ["b0"]


def test_a_new_episode_without_a_priority_has_the_highest_that_was_set(lake):
    record_priorities(lake, [1.0] * 3, "a")
    drawn = live(lake, "prioritized", alpha=1.0)
    samples = drawn.take(100)
    drawn.update_priorities(samples, [1000.0 if sample.episode_id == "a0" else 1.0 for sample in samples])
    record_priorities(lake, [None], "b")
    assert len({sample.episode_id for sample in samples}) == 3
    chances = {sample.episode_id: sample.probability for sample in drawn.take(100)}
    assert chances["b0"] == chances["a0"] == pytest.approx(1000 / 2002)


@pytest.mark.parametrize("most", [None, 1])
def test_a_live_draw_waits_for_the_first_episode_that_has_a_priority(lake, most):
    record_priorities(lake, [0.0] * 3, "a")
    drawn = live(lake, "prioritized", max_times_sampled=most)
    with pytest.raises(TimeoutError, match=r"3 episodes, 0 samples were drawn, 0 can be drawn"):
        drawn.take(1, timeout=0.1)
    record_priorities(lake, [1.0], "b")
    (sample,) = drawn.take(1, timeout=60)
    assert sample.episode_id == "b0"
    drawn.update_priorities([sample], [0.0])
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)
    if most is None:
        drawn.update_priorities([sample], [1.0])
        assert ids(drawn.take(2, timeout=60)) == ["b0", "b0"]


def test_groups_wait_until_they_are_complete(lake):
    with lake.writer(run="run", worker="w") as writer:

        def rollout(group, reward):
            with writer.episode(group_id=group) as episode:
                episode.step(message="x")
                episode.end(reward=reward)

        for reward in (0.0, 1.0):
            rollout("a", reward)
        writer.flush()
        drawn = live(lake, "group", least=3)
        with pytest.raises(TimeoutError):
            drawn.take(1, timeout=0.1)
        rollout("a", 1.0)
        writer.flush()
        assert [sample.reward for sample in sorted(drawn.take(1), key=lambda each: each.episode_id)] in (
            [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0],
        )  # fmt: skip


def test_a_draw_that_waits_in_vain_says_what_is_missing(lake):
    with lake.writer(run="run", worker="w") as writer:
        for group, rewards in {"a": (0.0, 1.0), "b": (1.0, 1.0), "c": (1.0,)}.items():
            for reward in rewards:
                with writer.episode(group_id=group) as episode:
                    episode.step(message="x")
                    episode.end(reward=reward)
    drawn = live(lake, "group", least=2)
    with pytest.raises(
        TimeoutError, match=r"there are 5 episodes, 0 samples were drawn, 1 can be drawn; left out: 1 few"
    ):
        drawn.take(2, timeout=0.1)
    assert drawn.left_out == {
        "fewer than 2 rollouts in their group": 1,
        "the reward does not vary in their groups (1 groups)": 2,
    }
    assert len(drawn.take(1)) == 2
    with pytest.raises(
        TimeoutError, match=r"0 can be drawn; left out: 2 drawn as often as they may be, 1 fewer than 2"
    ):
        drawn.take(1, timeout=0.1)


def test_lags_are_behind_the_newest_policy_after_its_episodes_were_drawn(lake):
    with lake.writer(run="run", worker="w") as writer:
        for version in range(4):
            with writer.episode(policy_name="p", policy_version=str(version)) as episode:
                episode.step(message="x")
    drawn = live(lake, "lifo")
    lags = []
    for _ in range(4):
        record(lake, [len(lags)], worker=f"x{len(lags)}")  # the population is made anew
        lags += [sample.policy_lag for sample in drawn.take(2) if sample.policy_lag is not None]
    assert lags == [0.0, 1.0, 2.0, 3.0]


def test_the_verifier_and_the_trainer_of_the_documentation_draw_whole_groups(lake):
    text = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    section = text.partition("### Groups whose rewards come later")[2].partition("\n## ")[0]
    trainer, verifier = (block.partition("```")[0] for block in section.split("```python\n")[1:])
    with lake.writer(run="grpo-7", worker="w") as writer:
        for number in range(64):
            with writer.episode(group_id=f"g{number // 8}", trial=number % 8) as episode:
                episode.step(message="x", token_ids=[1], logprobs=[-0.5])
    assert "batch(1, timeout=600)" in verifier
    exec(verifier.replace("batch(1,", "batch(64,"), {"lake": lake, "verify": lambda each: each.episode["trial"] % 2})
    names = {"lake": lake, "SampleToInsertRatio": SampleToInsertRatio}
    exec(trainer, names)
    assert Counter(each.episode["group_id"] for each in names["batch"]) == {f"g{group}": 8 for group in range(8)}
    assert {each.episode["success"] for each in names["batch"]} == {True, False}


# -- flow control --------------------------------------------------------------------------------------------------


def test_nothing_is_drawn_before_enough_is_there(lake):
    drawn = live(lake, "uniform", limiter=MinSize(3))
    record(lake, range(2))
    with pytest.raises(TimeoutError, match="there are 2 episodes"):
        drawn.take(1, timeout=0.1)
    writing = threading.Timer(0.3, lambda: record(lake, [5], worker="x"))
    writing.start()
    assert len(drawn.take(50, timeout=30)) == 50
    writing.join()


@pytest.mark.parametrize("count", [0, -1])
def test_live_draws_are_one_at_least(lake, count):
    drawn = lake.sampler(live=True)
    for draw in (drawn.take, drawn.batch):
        with pytest.raises(UsageError, match=f"1, 2, 3, … at once, not {count}"):
            draw(count, timeout=1)


def test_samples_keep_to_their_ratio_to_inserts(lake):
    drawn = live(lake, "uniform", limiter=SampleToInsertRatio(2.0, min_size_to_sample=2, error_buffer=4.0))
    record(lake, range(2))
    drawn.take(4)
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)
    record(lake, range(2, 4), worker="x")
    drawn.take(4)
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)
    with pytest.raises(UsageError, match="could wait for ever: the limiter allows 6"):
        drawn.take(7)


def test_inserts_are_the_episodes_that_fit_the_filter(lake):
    record(lake, range(8), run="old")
    compact(lake)
    record(lake, range(8, 10), run="new")
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=3, error_buffer=1.0)
    drawn = live(lake, "fifo", where="run_id = 'new'", limiter=limiter)
    with pytest.raises(TimeoutError, match=r"there are 2 episodes, .*, the limiter allows no more"):
        drawn.take(1, timeout=0.1)
    record(lake, [10], run="new")
    assert ids(drawn.take(1)) == ["e0008"]


def test_inserts_do_not_fall_when_what_was_drawn_no_longer_fits(lake):
    """As of a verifier that draws what has no reward yet, and gives it one."""
    with lake.writer(run="run", worker="w") as writer:
        for number in range(4):
            with writer.episode(episode_id=f"e{number}") as episode:
                episode.step(message="x")
    drawn = live(lake, "fifo", where="reward IS NULL")
    assert len(drawn.take(2)) == 2
    with lake.scores("run") as scores:
        for number in range(4):
            scores.add(f"e{number}", "reward", 1.0)
    with pytest.raises(TimeoutError, match="there are 2 episodes, 2 samples were drawn"):
        drawn.take(1, timeout=0.1)
    resumed = live(lake, "fifo", where="reward IS NULL")
    resumed.load_state_dict(json.loads(json.dumps(drawn.state_dict())))
    assert resumed.inserts == 2


@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_least_buffer_never_lets_both_sides_wait(ratio, batch):
    limiter = SampleToInsertRatio(ratio, min_size_to_sample=5, error_buffer=max(1.0, ratio) * batch)
    inserts = samples = 0
    for _ in range(2000):
        insert = limiter.can_insert(inserts, samples, 1)
        sample = limiter.can_sample(inserts, samples, batch)
        assert insert or sample
        if sample:
            samples += batch
        else:
            inserts += 1
    assert abs(samples - ratio * inserts) <= ratio * 5 + 2 * limiter.error_buffer


@pytest.mark.parametrize("wrong", [(0.0, 1, 1.0), (1.0, 0, 1.0), (4.0, 1, 3.0), (0.5, 1, 0.9), (1.0, 1, float("nan"))])
def test_settings_that_would_deadlock_are_refused(wrong):
    with pytest.raises(UsageError):
        SampleToInsertRatio(*wrong)
