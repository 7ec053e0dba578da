"""Strategies against their definitions; sharding and resuming as properties. Everything here is in memory."""

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajlake.errors import UsageError
from trajlake.read import draws as draws_module
from trajlake.read.draws import occurrences, shuffled
from trajlake.read.items import Window
from trajlake.read.population import Recipe, population
from trajlake.read.prioritized import SumTree
from trajlake.read.sampler import Sampler
from trajlake.read.strategies import strategies, strategy_of
from trajlake_schemas import EPISODES

pytestmark = pytest.mark.unit


class Nowhere:
    """A source without episodes: drawing needs none."""

    lake_id, token = "lake", "e1.s1"


def episodes(count=12, **columns):
    """Rows of `episodes`, as a snapshot would give them."""
    numbers = np.arange(count)
    given = {
        "episode_id": [f"e{number:06d}" for number in numbers],
        "n_steps": 3 + numbers % 4,
        "reward": (numbers % 3).astype(float),
        "success": numbers % 3 > 0,
        "policy_version": [str(number // 3) for number in numbers],
        "group_id": [f"g{number // 4}" for number in numbers],
        "task_id": [f"t{number // 4}" for number in numbers],
        "domain": [("air", "rail", "sea")[number % 3] for number in numbers],
        "ended_at": numbers[::-1],
        **columns,
    }
    empty = pl.from_arrow(EPISODES.arrow.empty_table())
    types = {name: empty.schema[name] for name in empty.columns if name != "ended_at"}
    frame = pl.DataFrame({name: given.get(name, [None] * count) for name in (*types, "ended_at")}, strict=False)
    return frame.with_columns(pl.col(name).cast(types[name]) for name in types)


def sampler(strategy="uniform", rows=None, *, rank=0, world_size=1, options=None, **recipe):
    from trajlake.read.population import columns_of

    recipe = Recipe(strategy_of(strategy, options or {}), **recipe)
    rows = episodes() if rows is None else rows
    return Sampler(
        Nowhere(), population(rows.select(columns_of(recipe)), recipe), recipe, rank=rank, world_size=world_size
    )


def chi_square(counts, expected):
    """Pearson's statistic, and the 0.9999 quantile by Wilson and Hilferty's approximation (1931)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    free = len(counts) - 1
    limit = free * (1 - 2 / (9 * free) + 3.719 * np.sqrt(2 / (9 * free))) ** 3
    return ((counts - expected) ** 2 / expected).sum(), limit


def assert_fits(draws, probabilities):
    """What was drawn fits the probabilities, and each draw says its own."""
    probabilities = np.asarray(probabilities, float)
    counts = np.bincount(draws.item, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    some = probabilities > 0
    found, limit = chi_square(counts[some], probabilities[some] * len(draws))
    assert found < limit
    assert np.allclose(draws.probability, probabilities[draws.item])


# -- each strategy against its definition --------------------------------------------------------------------------


def test_uniform_gives_every_item_the_same_chance():
    assert_fits(sampler(seed=3).draw(60_000), np.full(12, 1 / 12))


@pytest.mark.parametrize("table_size", [draws_module._TABLE_SIZE, 0])
def test_epochs_give_every_item_once_an_epoch_in_an_order_that_is_uniform(monkeypatch, table_size):
    monkeypatch.setattr(draws_module, "_TABLE_SIZE", table_size)  # 0: the permutation without a table
    size, epochs = 12, 6_000
    items = shuffled(5, 0, size * epochs, size).reshape(epochs, size)
    assert (np.sort(items, axis=1) == np.arange(size)).all()
    for place in range(size):
        found, limit = chi_square(np.bincount(items[:, place], minlength=size), np.full(size, epochs / size))
        assert found < limit
    pairs = items[:, 0] * size + items[:, 1]  # neighbours do not depend on each other
    counts = np.bincount(pairs, minlength=size * size).reshape(size, size)[~np.eye(size, dtype=bool)]
    found, limit = chi_square(counts, np.full(len(counts), epochs / len(counts)))
    assert found < limit


def test_a_large_permutation_needs_no_table():
    size = draws_module._TABLE_SIZE * 3 + 1
    items = shuffled(1, size * 7, 200_000, size)
    assert len(np.unique(items)) == 200_000
    assert 0 <= items.min() <= items.max() < size
    found, limit = chi_square(np.histogram(items, 64, (0, size))[0], np.full(64, 200_000 / 64))
    assert found < limit
    assert not np.array_equal(items, shuffled(1, size * 8, 200_000, size))


def test_less_than_no_draw_is_refused():
    drawn = sampler("epochs")
    assert drawn.take(0) == []
    for draw in (drawn.take, drawn.draw, drawn.batch):
        with pytest.raises(UsageError, match="at once, not -1"):
            draw(-1)
    assert len(drawn.take(12)) == 12, "the place was kept"


def test_epochs_end_where_they_are_counted():
    drawn = sampler("epochs", options={"epochs": 2})
    assert len(drawn.take(100)) == 24
    assert drawn.take(1) == []
    assert {sample.times_sampled for sample in sampler("epochs").take(24)[12:]} == {2}


def test_fifo_and_lifo_give_each_once_by_age():
    oldest_first = [f"e{number:06d}" for number in range(11, -1, -1)]
    assert [sample.episode_id for sample in sampler("fifo")] == oldest_first
    assert [sample.episode_id for sample in sampler("lifo")] == oldest_first[::-1]
    by_reward = [sample.reward for sample in sampler("fifo", options={"order": "reward"})]
    assert by_reward == sorted(by_reward)


def test_recency_bounds_the_policy_lag():
    drawn = sampler("recency", options={"max_lag": 1})
    assert {sample.policy_lag for sample in drawn.take(200)} == {0.0, 1.0}
    assert drawn.left_out == {"policy lag above 1": 6}
    assert_fits(drawn.draw(30_000), np.full(6, 1 / 6))
    later = sampler("recency", options={"max_lag": 2}, policy_version=5)
    assert {sample.policy_lag for sample in later.take(50)} == {2.0}
    named = episodes(policy_version=["main"] * 6 + ["7"] * 6)
    assert sampler("recency", named, options={"max_lag": 0}).left_out == {"policy_version is not a number": 6}


def test_policy_lag_is_within_one_policy_of_one_run():
    rows = episodes(
        4,
        run_id=["a", "a", "b", "b"],
        policy_name=["small", "small", "small", "large"],
        policy_version=["10", "7", "2", "900"],
    )
    lags = {sample.episode_id: sample.policy_lag for sample in sampler("epochs", rows).take(4)}
    assert lags == {"e000000": 0.0, "e000001": 3.0, "e000002": 0.0, "e000003": 0.0}
    told = {sample.episode_id: sample.policy_lag for sample in sampler("epochs", rows, policy_version=12).take(2)}
    assert all(lag == 12 - float(rows["policy_version"][int(name[1:])]) for name, lag in told.items())


def test_episodes_without_steps_are_drawn_only_where_asked_for():
    rows = episodes(4, n_steps=[0, 2, 0, 3])
    drawn = sampler("epochs", rows)
    assert drawn.left_out == {"no steps": 2}
    assert {sample.episode_id for sample in drawn.take(8)} == {"e000001", "e000003"}
    every = sampler("epochs", rows, empty=True)
    assert every.left_out == {}
    assert len({sample.episode_id for sample in every.take(4)}) == 4
    with pytest.raises(UsageError, match="4 were left out: no steps"):
        sampler("uniform", episodes(4, n_steps=[0] * 4))


def test_recency_halves_the_chance_by_half_life():
    weights = 2.0 ** -np.repeat([3, 2, 1, 0], 3)
    assert_fits(sampler("recency", options={"half_life": 1}, seed=2).draw(60_000), weights / weights.sum())


def test_prioritized_is_as_in_the_paper():
    priorities = np.arange(12, dtype=float)  # the first is never drawn
    drawn = sampler("prioritized", episodes(reward=priorities), options={"alpha": 0.7, "beta": 0.5}, seed=4)
    draws = drawn.draw(60_000)
    chances = priorities**0.7 / (priorities**0.7).sum()
    assert_fits(draws, chances)
    with np.errstate(divide="ignore"):
        weights = (12 * chances) ** -0.5
    assert np.allclose(draws.weight, weights[draws.item] / weights[1:].max())
    drawn.update_priorities(draws, np.where(draws.item == 3, 100.0, 0.0))
    assert set(drawn.draw(100).item.tolist()) <= {3, 0}
    assert drawn.draw(1).weight.tolist() == [1.0]


def test_priorities_by_expression_and_those_that_are_missing():
    rewards = [None, float("nan"), 0.0, 1.0, *([3.0] * 8)]
    drawn = sampler("prioritized", episodes(reward=rewards), options={"priority": "reward * 2", "alpha": 1.0}, seed=1)
    assert_fits(drawn.draw(40_000), np.array([6, 6, 0, 2, *([6] * 8)]) / 62)
    for priority, reason in [("domain", "give a number"), ("reward - 5", "negative or infinite for 10 items")]:
        with pytest.raises(UsageError, match=reason):
            sampler("prioritized", episodes(reward=rewards), options={"priority": priority})
    for wrong in ([-1.0], [float("nan")], [1.0, 2.0]):
        with pytest.raises(UsageError):
            drawn.update_priorities(drawn.draw(1), wrong)
    with pytest.raises(UsageError, match="no priorities"):
        sampler().update_priorities([], [])


def test_what_has_no_priority_has_the_highest_of_those_that_are_current():
    rewards = [None, float("nan"), 1.0, *([2.0] * 9)]
    drawn = sampler("prioritized", episodes(reward=rewards), options={"alpha": 1.0}, seed=1)

    def expect(*priorities):
        chances = np.array(priorities) / sum(priorities)
        resumed = sampler("prioritized", episodes(reward=rewards), options={"alpha": 1.0}, seed=1)
        resumed.load_state_dict(json.loads(json.dumps(drawn.state_dict())))
        draws = drawn.draw(20_000)
        assert_fits(draws, chances)
        again = resumed.draw(20_000)
        assert np.array_equal(again.item, draws.item)
        assert np.array_equal(again.probability, draws.probability)

    def update(items, priorities):
        drawn.set_priorities(np.array(items), priorities)

    expect(2, 2, 1, *[2] * 9)
    update([2], [8.0])
    expect(8, 8, 8, *[2] * 9)
    update([0, 2], [0.5, 4.0])  # the first is known now; the highest has fallen
    expect(0.5, 4, 4, *[2] * 9)
    update([0, *range(3, 12)], [0.0] * 10)
    expect(0, 4, 4, *[0] * 9)
    update([2], [0.0])  # a new one is drawn where nothing else can be
    assert set(drawn.draw(100).item.tolist()) == {1}
    update([1], [0.0])
    assert drawn.left == 0
    nothing_known = sampler("prioritized", episodes(reward=[None] * 12), seed=1)
    assert_fits(nothing_known.draw(20_000), np.full(12, 1 / 12))


def test_the_weights_exponent_rises_to_one():
    drawn = sampler("prioritized", options={"priority": "reward + 1", "alpha": 1, "beta": 0.0, "anneal": 1000})
    draws = drawn.draw(2000)
    least = draws.probability.min()
    assert draws.weight[0] == 1.0
    assert np.allclose(draws.weight[1000:], least / draws.probability[1000:])


def test_the_weights_exponent_rises_by_position_whatever_may_no_longer_come():
    """Which takes more and more draws a position."""
    options = {"priority": "reward + 1", "alpha": 1.0, "beta": 0.0, "anneal": 48}
    for sizes in ([48], [5] * 9 + [3]):
        drawn = sampler("prioritized", options=options, max_times_sampled=4)
        samples = [sample for size in sizes for sample in drawn.take(size)]
        exponents = np.array([sample.position for sample in samples]) / 48
        priorities = np.array([sample.reward + 1 for sample in samples])
        assert np.allclose([sample.weight for sample in samples], priorities**-exponents)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.data())
def test_a_sum_tree_finds_what_a_cumulative_sum_finds(values, data):
    tree = SumTree(np.array(values))
    changed = data.draw(st.dictionaries(st.integers(0, len(values) - 1), st.floats(0, 10), max_size=10))
    for item, value in changed.items():
        values[item] = value
    tree.set(np.array(list(changed), np.int64), np.array(list(changed.values())))
    assert np.isclose(tree.total, sum(values))
    if tree.total > 0:
        masses = np.linspace(0, tree.total, 50, endpoint=False)
        found = tree.find(masses)
        assert (np.array(values)[found] > 0).all()
        ends = np.cumsum(values)
        slack = 1e-6 * tree.total
        assert (masses <= ends[found] + slack).all()
        assert (masses >= ends[found] - np.array(values)[found] - slack).all()
        assert tree.least == min(value for value in values if value > 0)
    again = SumTree(np.array(values))
    assert np.array_equal(tree._sums, again._sums)


def test_stratified_follows_the_ratios():
    drawn = sampler("stratified", options={"by": ["domain"], "ratios": {"air": 3, "sea": 1}}, seed=9)
    assert drawn.left_out == {"stratum has no ratio": 4}
    draws = drawn.draw(40_000)
    domains = drawn.population.rows["stratum"]
    assert_fits(draws, [0.75 / 4 if domain == "air" else 0.25 / 4 for domain in domains])
    uneven = episodes(domain=["air"] * 9 + ["rail"] * 2 + [None])
    expected = [1 / 27] * 9 + [1 / 6] * 2 + [1 / 3]
    assert_fits(sampler("stratified", uneven, options={"by": ["domain"]}, seed=1).draw(40_000), expected)
    with pytest.raises(UsageError, match="no episode has domain = moon; there is air, rail, sea"):
        sampler("stratified", options={"ratios": {"moon": 1}})


def test_difficulty_is_a_band_of_pass_rates():
    solved = [False] * 4 + [True, False, False, False] + [True] * 4
    domains = [*["air"] * 4, *["rail"] * 4, *["sea"] * 4]
    for tasks in (["t0"] * 4 + ["t1"] * 4 + ["t2"] * 4, ["0"] * 12):  # the last are tasks of three domains
        rows = episodes(success=solved, domain=domains, task_id=tasks)
        drawn = sampler("difficulty", rows, options={"low": 0.25, "high": 0.9})
        assert {sample.group_id for sample in drawn.take(50)} == {"g1"}
        assert drawn.left_out == {"pass rate of its task outside 0.25 to 0.9": 8}
    tasks = [*["a"] * 4, *["b"] * 4, *[None] * 4]
    unjudged = episodes(success=[None] * 4 + solved[4:], domain=domains, task_id=tasks)
    drawn = sampler("difficulty", unjudged, options={"low": 0, "high": 1})
    assert drawn.left_out == {"no episode of its task was judged": 4}
    assert_fits(drawn.draw(20_000), np.full(8, 1 / 8))


def test_a_curriculum_moves_with_the_step():
    solved = [True] * 4 + [True, True, False, False] + [False] * 4  # pass rates 1, 0.5 and 0
    stages = [(0, 0.9, 1.0), (10, 0.4, 0.6), (20, 0.0, 0.0)]
    rows = episodes(success=solved, domain=["air"] * 12)
    drawn = sampler("curriculum", rows, options={"stages": stages, "draws_per_step": 100})
    groups = [sample.group_id for sample in drawn.take(3000)]
    assert set(groups[:100]) == {"g0"}
    assert set(groups[1000:1100]) == {"g1"}
    assert set(groups[2500:]) == {"g2"}
    assert set(groups[300:400]) == {"g0"}  # the band 0.75 … 0.88 holds no task: the nearest
    with pytest.raises(UsageError, match="must rise"):
        sampler("curriculum", options={"stages": [(5, 0, 1), (5, 0, 1)]})
    with pytest.raises(UsageError, match="needs stages of STEP:LOW:HIGH"):
        sampler("curriculum")


def test_groups_come_whole_and_those_without_variance_are_counted():
    groups = ["a"] * 3 + ["b"] * 5 + ["c"] * 2 + ["d", None, None]
    rewards = [0, 1, 0, 1, 1, 1, 1, 1, 0, None, 1, 0, 1]
    drawn = sampler("group", episodes(13, group_id=groups, reward=rewards), options={"epochs": 1})
    samples = drawn.take(10)
    assert [sample.episode_id for sample in samples] == ["e000000", "e000001", "e000002"]
    assert {sample.position for sample in samples} == {0}
    assert drawn.left_out == {
        "no group_id": 2,
        "the reward does not vary in their groups (3 groups)": 8,
    }
    every = sampler("group", episodes(13, group_id=groups), options={"drop_constant": False, "replace": True}, seed=1)
    assert_fits(every.draw(20_000), np.full(4, 1 / 4))
    sizes = {sample.group_id: 0 for sample in every.take(50)}
    for sample in every.take(1):
        sizes[sample.group_id] += 1
    assert sum(sizes.values()) == {"a": 3, "b": 5, "c": 2, "d": 1}[max(sizes, key=sizes.get)]


def test_rewards_are_normalised_within_groups():
    samples = sampler("fifo", normalize_reward=("group_id",)).take(12)
    by_group = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append((sample.reward, sample.normalized_reward))
    for pairs in by_group.values():
        rewards, normalized = map(np.array, zip(*pairs, strict=True))
        assert np.allclose(normalized, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
    odd = episodes(reward=[None, float("nan"), 5.0, *([1.0] * 9)], domain=["x", "x", "x", *["y"] * 9])
    found = {
        sample.episode_id: sample.normalized_reward for sample in sampler("fifo", odd, normalize_reward=("domain",))
    }
    assert (found["e000000"], found["e000001"], found["e000002"], found["e000005"]) == (None, None, 0.0, 0.0)


# -- windows -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([(True, False), (False, False), (False, True)]),
)
def test_windows_never_cross_an_episode_and_are_all_there(steps, length, shift, rest):
    window = Window(length, shift, drop_remainder=rest[0], pad=rest[1])
    expected = [
        (f"e{row:06d}", start, min(start + length, count))
        for row, count in enumerate(steps)
        for start in range(0, count, shift)
        if not rest[0] or start + length <= count
    ]
    if not expected:
        with pytest.raises(UsageError, match="no window"):
            sampler("epochs", episodes(len(steps), n_steps=steps), window=window)
        return
    drawn = sampler("epochs", episodes(len(steps), n_steps=steps), window=window, options={"epochs": 1})
    found = [(sample.episode_id, sample.start, sample.stop) for sample in drawn.take(1000)]
    assert sorted(found) == expected


# -- sharding and resuming -----------------------------------------------------------------------------------------

_OPTIONS = {
    "recency": {"half_life": 2.0},
    "prioritized": {"priority": "reward + 1"},
    "stratified": {"by": ["domain"]},
    "curriculum": {"stages": [(0, 0.5, 1.0), (40, 0.0, 0.5)]},
    "difficulty": {"low": 0.0, "high": 1.0},
    "epochs": {"epochs": 3},
}
_every = st.sampled_from(sorted(strategies()))


def made(name, count, most=None, **where):
    most = None if name == "curriculum" else most
    rows = episodes(count, success=[number % 2 > 0 for number in range(count)])
    return sampler(name, rows, options=_OPTIONS.get(name), max_times_sampled=most, **where)


@given(
    _every, st.integers(8, 40), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**63 - 1), st.none() | st.just(2)
)
def test_the_parts_of_the_readers_are_disjoint_and_together_the_single_sequence(name, count, world, size, seed, most):
    single = made(name, count, most, seed=seed).take(size * world * 3)
    parts = [made(name, count, most, seed=seed, rank=rank, world_size=world) for rank in range(world)]
    taken = [[sample for _ in range(3) for sample in part.take(size)] for part in parts]
    merged = sorted(
        (sample for part in taken for sample in part), key=lambda sample: (sample.position, sample.episode_id)
    )
    assert merged == single
    positions = [{sample.position for sample in part} for part in taken]
    assert sum(map(len, positions)) == len(set().union(*positions))


@settings(max_examples=40)
@given(_every, st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 5), st.none() | st.integers(1, 3))
def test_a_resumed_sampler_goes_on_exactly(name, sizes, cut, most):
    whole, halves = made(name, 20, most, seed=1), made(name, 20, most, seed=1)
    for number, size in enumerate(sizes):
        if number == cut:
            state = json.loads(json.dumps(halves.state_dict()))
            halves = made(name, 20, most, seed=1)
            halves.load_state_dict(state)
        expected, found = whole.draw(size), halves.draw(size)
        for field in ("position", "item", "probability", "weight", "times_sampled"):
            assert np.array_equal(getattr(expected, field), getattr(found, field)), field
        if name == "prioritized":
            for drawer, draws in ((whole, expected), (halves, found)):
                drawer.update_priorities(draws, 1.0 + draws.item % 5)


def test_a_trainer_that_is_killed_and_resumed_with_other_readers_sees_every_episode_once():
    seen, state = [], None
    for world in (3, 5, 2, 4):
        readers = [
            sampler("epochs", episodes(100), options={"epochs": 1}, rank=rank, world_size=world)
            for rank in range(world)
        ]
        for reader in readers:
            if state is not None:
                reader.load_state_dict(state)
        seen += [sample.episode_id for reader in readers for sample in reader.take(7)]
        state = readers[0].state_dict()
        assert all(reader.state_dict() == state for reader in readers)
    assert len(set(seen)) == len(seen) == 98
    last = sampler("epochs", episodes(100), options={"epochs": 1})
    last.load_state_dict(state)
    seen += [sample.episode_id for sample in last.take(7)]
    assert sorted(seen) == [f"e{number:06d}" for number in range(100)]


def test_a_state_of_another_sequence_is_refused():
    state = sampler("epochs", seed=1).state_dict()
    for other in (sampler("epochs", seed=2), sampler("uniform", seed=1), sampler("epochs", seed=1, unique=True)):
        with pytest.raises(UsageError, match="the state is of another sampler"):
            other.load_state_dict(state)
    ended = sampler("fifo")
    with pytest.raises(UsageError, match="the sequence ends at 12"):
        ended.load_state_dict({**ended.state_dict(), "position": 13})


@pytest.mark.parametrize(
    "damage",
    [{"position": None}, {"position": "x"}, {"updates": {}}, {"updates": None}, {"times_sampled": {"items": "%"}}],
    ids=str,
)
def test_a_sampler_that_refused_a_state_or_a_position_goes_on_where_it_was(damage):
    drawn, other = (made("prioritized", 20, 2, seed=4) for _ in range(2))
    drawn.draw(7), other.draw(7)
    with pytest.raises(UsageError, match="the state is damaged"):
        drawn.load_state_dict({**drawn.state_dict(), **damage})
    with pytest.raises(UsageError, match="the state is damaged"):
        drawn.load_state_dict([])
    with pytest.raises(UsageError, match="a position must be from 0"):
        drawn.go_to(-1)
    assert drawn.take(5) == other.take(5)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("name", sorted(strategies()))
def test_a_position_is_gone_to_as_if_all_before_it_had_been_drawn(name, most):
    for position in (0, 1, 19, 20, 33, 60, 100):
        walked, gone = made(name, 20, most, seed=4), made(name, 20, most, seed=4)
        walked.draw(position)
        gone.draw(3)
        gone.go_to(position)
        assert gone.state_dict() == walked.state_dict()
        assert gone.take(25) == walked.take(25)


def test_epochs_are_skipped_and_positions_that_are_too_far_refused():
    drawn = sampler("epochs", episodes(100))
    drawn.go_to(2**31 - 1)
    (sample,) = drawn.take(1)
    assert sample.position == 2**31 - 1
    assert sample.times_sampled == (2**31 - 1) // 100 + 1
    for wrong in (-1, 2**31):
        with pytest.raises(UsageError, match="a position must be from 0 to 2,147,483,647"):
            drawn.go_to(wrong)
        with pytest.raises(UsageError, match="a position must be from 0"):
            drawn.load_state_dict({**drawn.state_dict(), "position": wrong})


@pytest.mark.parametrize("name", ["uniform", "prioritized", "stratified", "recency", "epochs", "difficulty"])
def test_no_item_comes_more_often_than_it_may(name):
    drawn = made(name, 20, 3, seed=2)
    samples = drawn.take(1000)
    assert len(samples) == 60
    assert max(sample.times_sampled for sample in samples) == 3
    assert drawn.take(1) == []


def test_what_is_very_improbable_comes_too_and_soon_and_the_same_however_it_is_cut():
    priorities = 10.0 ** -np.arange(0, 240, 4)  # 60 items
    rows = episodes(60, reward=priorities)

    def make():
        return sampler("prioritized", rows, options={"alpha": 1.0}, seed=3, max_times_sampled=2)

    whole, pieces = make(), make()
    draws = whole.draw(1000)
    assert np.bincount(draws.item).tolist() == [2] * 60
    for place in (5, 60, 110, 119):  # each probability is that among what could still come
        counts = np.bincount(draws.item[:place], minlength=60)
        chance = priorities[draws.item[place]] / priorities[counts < 2].sum()
        assert draws.probability[place] == pytest.approx(chance)
    for size in (1, 50, 7, 1, 30, 31):
        expected = slice(pieces.position, pieces.position + size)
        state = json.loads(json.dumps(pieces.state_dict()))
        pieces = make()
        pieces.load_state_dict(state)
        found = pieces.draw(size)
        for field in ("position", "item", "probability", "weight", "times_sampled"):
            assert np.array_equal(getattr(found, field), getattr(draws, field)[expected]), field
    assert not len(pieces.draw(1))
    aged = episodes(150, policy_version=[str(number) for number in range(150)])
    assert len(sampler("recency", aged, options={"half_life": 0.5}, max_times_sampled=1).draw(1000)) == 150


def test_what_has_come_often_enough_raises_the_chances_of_the_others():
    firsts, seconds = [], []
    rows = episodes(3, reward=[1.0, 2.0, 3.0])
    for seed in range(1200):
        drawn = sampler("prioritized", rows, options={"alpha": 1.0}, seed=seed, max_times_sampled=1)
        one, two = drawn.take(2)
        firsts.append(one.item)
        if one.item == 2:
            seconds.append(two.item)
            assert two.probability == pytest.approx((two.item + 1) / 3)
    found, limit = chi_square(np.bincount(seconds, minlength=2), np.array([1 / 3, 2 / 3]) * len(seconds))
    assert found < limit
    with pytest.raises(UsageError, match="population that stays"):
        sampler("curriculum", options={"stages": [(0, 0, 1), (9, 1, 1)]}, max_times_sampled=1)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("psychic", {}, "strategy must be one of uniform, epochs, fifo"),
        ("uniform", {"alpha": 1}, "has no option 'alpha': it has no options"),
        ("prioritized", {"lambda": 1}, "its options are priority, alpha, beta, anneal"),
        ("recency", {}, "needs max_lag, half_life"),
        ("epochs", {"epochs": 0}, "at least 1"),
        ("difficulty", {"low": 0.9, "high": 0.1}, "from a lower to a higher"),
        ("stratified", {"ratios": {"air": 0}}, "above 0"),
    ],
)
def test_wrong_strategies_are_refused_with_what_is_right(strategy, options, reason):
    with pytest.raises(UsageError, match=reason):
        strategy_of(strategy, options)


def test_duplicates_and_retracted_episodes_are_left_out_and_counted():
    rows = episodes(duplicate_of=["e000003"] * 3 + [None] * 9, retracted=[None] * 10 + ["bad"] * 2)
    assert sampler(rows=rows).left_out == {"retracted": 2}
    drawn = sampler(rows=rows, unique=True)
    assert drawn.left_out == {"retracted": 2, "repeats another episode": 3}
    assert len(drawn) == 7
    with pytest.raises(UsageError, match="12 were left out: retracted"):
        sampler(rows=episodes(retracted=["bad"] * 12))


def test_a_recipe_is_read_back_from_json():
    recipe = Recipe(
        strategy_of("curriculum", {"stages": [(0, 0.1, 0.2)]}),
        seed=3,
        where="reward > 0",
        window=Window(4, 2),
        normalize_reward=("domain",),
    )
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    for name in strategies():
        strategy = strategy_of(name, _OPTIONS.get(name, {}))
        assert strategy_of(json.loads(json.dumps(strategy.to_json())), {}).to_json() == strategy.to_json()
    with pytest.raises(UsageError, match="does not describe a sampler"):
        Recipe.from_json({"seed": 1})


def test_options_that_are_numbers_of_numpy_are_taken_as_pythons():
    for options, strategy in [
        ({"alpha": np.float32(0.3), "beta": np.float32(0.4), "anneal": np.int64(9)}, "prioritized"),
        ({"ratios": {"air": np.float32(2), "sea": np.int64(1)}, "by": ["domain"]}, "stratified"),
        ({"half_life": np.float64(2)}, "recency"),
    ]:
        numbers = {"seed": np.int64(7), "policy_version": np.int64(5), "max_times_sampled": np.int32(3)}
        window = Window(np.int64(2), np.int8(1))
        drawn = sampler(strategy, options=options, window=window, unique=np.bool_(False), **numbers)
        drawn.draw(3)
        state = json.loads(json.dumps(drawn.state_dict()))
        resumed = Recipe.from_json(state)
        again = Sampler(Nowhere(), drawn.population, resumed)
        again.load_state_dict(state)
        assert np.array_equal(again.draw(5).weight, drawn.draw(5).weight)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_occurrences_count_what_stands_before(values):
    assert occurrences(np.array(values, np.int64)).tolist() == [
        values[:at].count(value) for at, value in enumerate(values)
    ]
