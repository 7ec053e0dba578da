"""Reading: a snapshot shows one moment, whatever happens to the lake meanwhile."""

import pickle
import time
from collections import Counter

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollouts import assert_same_rows, record, rows

import trajlake
from trajlake.analysis.compare import compare
from trajlake.analysis.stats import summarize
from trajlake.errors import EpisodeMissing, LakeMissing, QueryError, SnapshotExpired, UsageError
from trajlake.read.draws import below, words
from trajlake.read.steps_reader import GroupCache
from trajlake.storage.wrappers import CountingStore
from trajlake.table.retention import vacuum
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(lake_uri):
    lake = trajlake.create(lake_uri)
    record(lake, [*range(12), 777])
    compact(lake)
    return lake


def test_sql_over_episodes_and_steps(lake):
    snapshot = lake.snapshot()
    assert snapshot.query("SELECT count(*) AS n, avg(reward) AS r FROM episodes").to_dicts() == [{"n": 13, "r": 7 / 13}]
    joined = snapshot.query(
        "SELECT e.task_id, count(*) AS n FROM episodes e JOIN steps s ON e.episode_id = s.episode_id GROUP BY 1"
    )
    assert joined["n"].sum() == 39


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT rewrd FROM episodes", "unknown column 'rewrd': did you mean reward or rewards"),
        ("SELECT tags.team FROM episodes", r"no column has a field 'team': the tag of that name is tags\['team'\]"),
        ("SELEC 1", "'SELEC' is not how it may begin: write SELECT, WITH, "),
        ("SELECT * FROM nowhere", "there is no table 'nowhere'"),
        ("SELECT foo(1)", "unsupported function 'foo'"),
        ("SELECT reward + status FROM episodes", "arithmetic"),
        ("SELECT * FROM episodes WHERE coalesce()", "Polars cannot do this"),
        ("SELECT * FROM read_csv('/etc/passwd')", "opens no files"),
        ("WITH a AS (SELECT 1) SELECT * FROM a, READ_PARQUET ('x')", "opens no files"),
        ("SELECT * FROM episodes WHERE reward::decimal(50, 2) > 0", "Polars cannot do this"),
    ],
)
def test_wrong_sql_is_one_clear_line(lake, sql, reason):
    with pytest.raises(QueryError, match=reason) as error:
        lake.snapshot().query(sql)
    assert "\n" not in str(error.value)
    assert "plan" not in str(error.value)


def test_sql_cannot_change_the_lake(lake):
    snapshot = lake.snapshot()
    assert snapshot.query("SELECT 'read_csv(''x'')' AS text")["text"].item() == "read_csv('x')"
    for sql in ("DROP TABLE episodes", "DELETE FROM episodes", "CREATE TABLE x AS SELECT 1"):
        with pytest.raises(QueryError, match="only reads.*retract"):
            snapshot.query(sql)
    assert snapshot.query("SELECT count(*) AS n FROM episodes")["n"].item() == 13


def test_a_filter_is_an_expression_and_nothing_else(lake):
    snapshot = lake.snapshot()
    assert len(snapshot.where("reward > 0.5 AND task_id = '1'").collect()) == 2
    assert len(snapshot.where("success -- '1' is solved").collect()) == len(snapshot.where("success").collect()) > 0
    for condition in ["reward >", "nope = 1", "1=1; DROP TABLE episodes", "success) OR (success", "success /*", "*"]:
        with pytest.raises(QueryError):
            snapshot.where(condition)
    for condition in ["success AS solved", "success solved", "tags['a'] = 'b' AS solved"]:
        with pytest.raises(QueryError, match="has a name: leave out AS"):
            snapshot.where(condition)
    for condition in ["coalesce()", "reward::decimal(50,2) > 0"]:  # Polars panics, which is no Exception
        for use in (lambda where: snapshot.collect(snapshot.where(where)), lambda where: snapshot.sampler(where=where)):
            with pytest.raises(QueryError, match="Polars cannot do this"):
                use(condition)
    with pytest.raises(QueryError, match="Polars cannot do this"):
        snapshot.sampler("prioritized", priority="reward::decimal(50,2) > 0")


def test_texts_are_found_whatever_plane_of_unicode_their_characters_are_of(tmp_path):
    texts = [chr(plane * 0x10000 + 0x600) + "/1" for plane in (0, 1, 2, 3, 4, 16)]
    lake = trajlake.create(tmp_path / "lake")

    def record_each(attempt):
        for text in texts:  # a file of episodes each, so that its least and greatest values are these
            with (
                lake.writer(run="run", worker="w") as writer,
                writer.episode(episode_id=text, task_id=text, attempt=attempt) as episode,
            ):
                episode.step(message=text)
            compact(lake)

    record_each(attempt=0)
    snapshot = lake.snapshot()
    for text in texts:
        for column in ("episode_id", "task_id"):
            assert snapshot.where(f"{column} = '{text}'").collect()["task_id"].to_list() == [text]
        assert snapshot.steps.filter(pl.col("episode_id") == text).collect()["message"].to_list() == [text]
    record_each(attempt=1)
    episodes, steps = rows(lake)
    assert sorted(episodes["episode_id"]) == sorted(steps["episode_id"]) == sorted(texts)
    assert set(episodes["attempt"]) == {1}


def test_tags_are_asked_for_by_name(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        for number, tags in enumerate([{"team": "a", "it's": "1"}, {"team": "b"}, None, {"team": "a"}]):
            with writer.episode(episode_id=f"e{number}", tags=tags) as episode:
                episode.step(message="x")
                episode.step(message="y")
        writer.flush()
        live = lake.sampler("fifo", live=True, where="tags['team'] = 'a'")
        assert [sample.episode_id for sample in live.take(2, timeout=60)] == ["e0", "e3"]
    compact(lake)
    snapshot = lake.snapshot()

    def fits(condition):
        return sorted(snapshot.where(condition).collect()["episode_id"])

    assert fits("tags['team'] = 'a'") == fits("TAGS[ 'team' ] = 'a'") == ["e0", "e3"]
    assert fits("tags['it''s'] = '1' AND tags['team'] = 'a'") == ["e0"]
    assert fits("tags['team'] IS NULL") == fits("tags IS NULL") == ["e2"]
    assert fits("episode_id <> 'tags[''team'']' AND tags['nope'] IS NULL") == ["e0", "e1", "e2", "e3"]
    assert snapshot.where("tags['team'] = 'a'").collect_schema() == snapshot.episodes.collect_schema()
    found = snapshot.query(
        "SELECT e.tags['team'], count(*) AS n FROM episodes e JOIN steps s ON e.episode_id = s.episode_id "
        "WHERE tags['team'] <> 'x' GROUP BY tags['team'] ORDER BY n"
    )
    assert found.rows() == [("b", 2), ("a", 4)]
    assert found.columns == ["tags['team']", "n"]


def test_a_tag_serves_wherever_a_column_is_named(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        for number in range(12):
            tags = {"team": "ab"[number % 2]} if number < 10 else None
            with writer.episode(episode_id=f"e{number:02d}", task_id=number // 4, tags=tags) as episode:
                episode.step(message="x")
                episode.end(success=number % 3 == 0, reward=float(number))
    compact(lake)
    snapshot = lake.snapshot()
    by = "tags['team']"
    assert summarize(snapshot, by=[by]).select(by, "episodes").rows() == [("a", 5), ("b", 5), (None, 2)]
    compared = compare(snapshot, "a", "b", by)
    assert (compared.column, compared.episodes_a, len(compared.tasks)) == (by, 5, 3)
    drawn = snapshot.sampler("stratified", by=(by,), ratios={"b": 1.0}).batch(20)
    assert {int(sample.episode_id[1:]) % 2 for sample in drawn.samples} == {1}
    together = snapshot.sampler("group", by=by, where=f"{by} = 'a'").batch(1)
    assert sorted(sample.episode_id for sample in together.samples) == ["e00", "e02", "e04", "e06", "e08"]
    normalized = snapshot.sampler("epochs", normalize_reward=by, where=f"{by} = 'b'").batch(5)
    assert sum(sample.normalized_reward for sample in normalized.samples) == pytest.approx(0.0)


def test_an_episode_is_found_by_its_id_and_by_the_beginning_of_it(lake):
    snapshot = lake.snapshot()
    assert len(snapshot.episode("e0003").steps) == 3
    assert snapshot.episode("e07").episode_id == "e0777"
    with pytest.raises(EpisodeMissing, match="more than 5 episodes begin with e00"):
        snapshot.episode("e00")
    with pytest.raises(EpisodeMissing, match="no episode x"):
        snapshot.episode("x")


def test_trajectories_come_in_the_order_asked_for_and_repeatedly(lake):
    wanted = ["e0005", "e0001", "e0005"]
    assert [found.episode_id for found in lake.snapshot().trajectories(wanted)] == wanted
    with pytest.raises(EpisodeMissing, match="no episode nope"):
        lake.snapshot().trajectories(["e0001", "nope"])


def test_an_episode_costs_one_read_of_the_store_once_its_file_is_known(lake):
    counting = CountingStore(lake.store)
    snapshot = trajlake.Lake(counting).snapshot()
    snapshot.episode("e0003")
    counting.reset()
    snapshot.episode("e0004")
    assert counting.calls["get_ranges"] == 1
    assert counting.calls["get"] == counting.calls["stat"] == counting.calls["list"] == 0


def test_the_first_episode_of_a_file_costs_two_reads_of_the_store(lake):
    counting = CountingStore(lake.store)
    snapshot = trajlake.Lake(counting).snapshot()
    counting.reset()
    snapshot.episode("e0003")
    assert sum(counting.calls.values()) == counting.calls["get_ranges"] == 2


def test_a_sampler_reads_what_it_draws_again_only_once(lake):
    counting = CountingStore(lake.store)
    sampler = trajlake.Lake(counting).snapshot().sampler(seed=1)
    first = sampler.batch(40).steps
    counting.reset()
    assert len(sampler.batch(40).steps) > 0
    assert sum(counting.calls.values()) == 0
    assert first.equals(lake.snapshot().sampler(seed=1).batch(40).steps)


def test_the_cache_of_row_groups_keeps_to_its_bound():
    tables = {("f", number): pa.table({"x": np.zeros(1000)}) for number in range(5)}
    cache = GroupCache(20_000)
    for group, table in tables.items():
        cache.put({group: table})
        cache.get([("f", 0)])
    assert cache.get(tables).keys() == {("f", 0), ("f", 4)}
    nothing = GroupCache(0)
    nothing.put(tables)
    assert nothing.get(tables) == {}


def test_lookups_with_and_without_the_index_find_the_same(lake):
    cold, warm = lake.snapshot(), lake.snapshot()
    for name in ("e0001", "e07"):
        warm.row_of(name)
    for wanted in (["e0003"], ["e0777", "e0001", "e0777"], []):
        cold._lookups = 0  # the first lookup is a scan
        assert cold.rows_of(wanted).equals(warm.rows_of(wanted))
    for name, reason in (("e00", "more than 5"), ("x", "no episode x"), ("e00011", "no episode")):
        with pytest.raises(EpisodeMissing, match=reason):
            warm.row_of(name)
    assert warm._index is not None
    assert warm.row_of("e07")["episode_id"].item() == "e0777"


def test_a_snapshot_is_opened_again_by_its_token_and_does_not_see_later_episodes(lake):
    before = lake.snapshot()
    record(lake, range(20, 23))
    compact(lake)
    assert len(lake.snapshot().episodes.collect()) == 16
    again = lake.snapshot(before.token)
    assert len(again.episodes.collect()) == 13
    assert_same_rows(before, again)


def test_a_snapshot_that_goes_to_another_process_is_the_same_there(lake):
    before = lake.snapshot()
    goes = pickle.dumps((before, before.sampler("uniform", seed=3)))
    record(lake, range(5), worker="later")
    compact(lake)
    snapshot, sampler = pickle.loads(goes)
    assert snapshot.token == before.token
    assert snapshot.episodes.collect().equals(before.episodes.collect())
    wanted = [one.episode_id for one in before.sampler("uniform", seed=3).batch(8)]
    assert [one.episode_id for one in sampler.batch(8)] == wanted


def test_a_lake_without_a_compaction_has_an_empty_snapshot(tmp_path):
    lake = trajlake.create(tmp_path / "empty")
    assert rows(lake)[0].is_empty()
    assert lake.snapshot(lake.snapshot().token).steps.collect().is_empty()


@pytest.mark.parametrize("token", ["", "x", "e1", "e1.s1.x", "../e1.s1"])
def test_what_is_no_token_is_refused(lake, token):
    with pytest.raises(UsageError, match="not a snapshot's token"):
        lake.snapshot(token)


def test_a_snapshot_whose_files_were_removed_is_expired_and_never_part_of_the_rows(lake):
    old = lake.snapshot()
    record(lake, [3], worker="b", attempt=1, steps=5)
    compact(lake)
    time.sleep(1.1)
    report = vacuum(lake, older_than_hours=0, force=True)
    assert {file.key.split("/")[0] for file in report.files} >= {"steps", "episodes", "landing", "jobs"}
    with pytest.raises(SnapshotExpired, match="take a newer snapshot"):
        old.query("SELECT count(message) AS n FROM steps")
    with pytest.raises(SnapshotExpired):
        list(lake.snapshot(old.token).trajectories(["e0001"]))
    with pytest.raises(SnapshotExpired):
        lake.snapshot("e9999.s9999")
    current = lake.snapshot()
    assert [len(found.steps) for found in current.trajectories(["e0003", "e0001"])] == [5, 3]


def test_vacuum_spares_what_is_young_and_a_dry_run_removes_nothing(lake):
    record(lake, [3], worker="b", attempt=1)
    compact(lake)
    assert vacuum(lake).files == []
    with pytest.raises(UsageError, match="give at least that, or force it"):
        vacuum(lake, older_than_hours=0.5)
    time.sleep(1.1)
    before = sorted(info.key for info in lake.store.list())
    planned = vacuum(lake, older_than_hours=0, force=True, dry_run=True)
    assert planned.files
    assert planned.bytes > 0
    assert [key for key in before if "_delta_log" not in key] == [
        info.key for info in lake.store.list() if "_delta_log" not in info.key
    ]
    done = vacuum(lake, older_than_hours=0, force=True)
    assert sorted(file.key for file in done.files) == sorted(file.key for file in planned.files)
    assert compact(lake).compactions == 0  # consumed segments that are gone are not missed


def test_vacuum_spares_segments_that_wait_and_those_that_are_quarantined(tmp_path):
    from tests.rollouts import record_episode

    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1, end=False)
    lake.store.put_if_absent("landing/run/w/000007/00000000.arrow", b"broken")
    compact(lake)
    time.sleep(1.1)
    vacuum(lake, older_than_hours=0, force=True)
    assert len(list(lake.store.list("landing/"))) == 2


def test_a_sample_is_a_function_of_snapshot_filter_seed_and_position(lake):
    snapshot = lake.snapshot()
    drawn = snapshot.sampler(seed=7).take(50)
    assert drawn == snapshot.sampler(seed=7).take(50)
    assert drawn != snapshot.sampler(seed=8).take(50)
    piecewise = snapshot.sampler(seed=7)
    assert [sample for size in (1, 3, 7, 39) for sample in piecewise.take(size)] == drawn
    resumed = snapshot.sampler(seed=7)
    resumed.load_state_dict({**resumed.state_dict(), "position": 20})
    assert resumed.take(30) == drawn[20:]
    with pytest.raises(UsageError, match="its seed is 8"):
        resumed.load_state_dict(snapshot.sampler(seed=8).state_dict())


def test_a_sample_does_not_change_with_a_second_compaction(lake):
    before = [sample.episode_id for sample in lake.snapshot().sampler(seed=7).take(32)]
    compact(lake)
    assert [sample.episode_id for sample in lake.snapshot().sampler(seed=7).take(32)] == before


def test_a_sampler_obeys_its_filter_and_says_when_nothing_fits(lake):
    sampler = lake.snapshot().sampler(where="success", seed=1)
    assert {sample.episode_id for sample in sampler.take(200)} == {
        f"e{number:04d}" for number in [1, 3, 5, 7, 9, 11, 777]
    }
    assert all(found.episode["success"] for found in sampler.batch(4))
    for wrong in ({"where": "reward > 5"}, {"strategy": "psychic"}, {"seed": -1}):
        with pytest.raises(UsageError):
            lake.snapshot().sampler(**wrong)


def test_uniform_draws_are_uniform():
    draws = below(words(seed=11, first=0, count=120_000), 12)
    counts = Counter(draws.tolist())
    chi_square = sum((counts[index] - 10_000) ** 2 / 10_000 for index in range(12))
    assert chi_square < 31.26  # the 0.999 quantile with 11 degrees of freedom


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 2**31))
def test_a_draw_depends_on_its_position_alone(seed, first, count, size):
    together = below(words(seed, first, count), size)
    apart = np.concatenate([below(words(seed, first + step, 1), size) for step in range(count)])
    assert np.array_equal(together, apart)
    assert ((together >= 0) & (together < size)).all()


def test_a_lake_that_is_not_there_is_told_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(LakeMissing, match="init"):
        trajlake.connect(tmp_path).snapshot()


def test_the_public_face_is_what_it_says():
    assert set(trajlake.__all__) == set(dir(trajlake))
    for name in trajlake.__all__:
        assert getattr(trajlake, name) is not None
    with pytest.raises(AttributeError):
        _ = trajlake.nothing
    assert isinstance(pl.LazyFrame(), pl.LazyFrame)
