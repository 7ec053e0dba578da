"""What must hold of every file, whatever is wrong with it: files of mutated rows, and the real ones."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajlake.errors import FormatError, UsageError
from trajlake.formats import Format, Record, Refused, detect_source, open_source
from trajlake.formats.rebuild import SOURCE_ROW, difference, stored
from trajlake.ingest.episode import EpisodeFields
from trajlake.ingest.segment import Event, encode_batch
from trajlake.read.trajectory import Trajectory

T = TypeVar("T")
_NASTY = [
    *(
        10**400,
        -(2**63),
        2**63,
        1e308,
        "\ud800",
        "\0",
        "NaN",
        "{}",
        "[]",
        "1999-01-01",
        "0001-01-01",
        -1e10,
        None,
        True,
    ),
    *map(json.loads, ["[]", "{}", "[[]]", "[{}]", '{"0": 0}', '{"0": {}}', '["x"]', '{"text": "x"}']),
]
_LEAVES = st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.sampled_from(_NASTY))
_NAMES = [
    "extra",
    "role",
    "message",
    "tool_calls",
    "tool_results",
    "content_kind",
    "content_key",
    "refusal",
    "step",
    "built",
]
_CHANGES = ["replace", "replace", "remove", "wrap", "text", "double", "rename"]


class Choices:
    """What a mutation has to decide, decided by Hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def one_of(self, values: Sequence[T]) -> T:
        return self._draw(st.sampled_from(values))

    def leaf(self) -> Any:
        return copy.deepcopy(self._draw(_LEAVES))

    def some_bytes(self) -> bytes:
        return self._draw(st.binary(max_size=4))


class Dice(Choices):
    """The same by chance, in a hundredth of the time."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def leaf(self) -> Any:
        random = self._random
        made = [
            random.randint(-9, 99),
            random.getrandbits(70),
            random.gauss(0, 1e6),
            math.nan,
            chr(random.randint(0, 999)),
        ]
        return copy.deepcopy(random.choice([*made, *_NASTY]))

    def some_bytes(self) -> bytes:
        return self._random.randbytes(self._random.randint(0, 4))


def mutations(rows: Sequence[Any]) -> st.SearchStrategy[Any]:
    """`mutated`, by Hypothesis."""
    texts = [json.dumps(row) for row in rows]  # Hypothesis would print arguments, and these may be large

    @st.composite
    def mutation(draw: st.DrawFn) -> Any:
        return mutated(Choices(draw), texts)

    return mutation()


def mutated(choices: Choices, texts: Sequence[str]) -> Any:
    """The value of one of the texts with up to four things changed, taken away, wrapped, doubled, renamed or written
    as text."""
    value = [json.loads(choices.one_of(texts))]
    for _ in range(choices.number(1, 4)):
        _mutate(choices, value)
    return value[0] if value else None


def _mutate(choices: Choices, target: Any) -> None:
    place: Any = None
    for _ in range(choices.number(1, 9)):
        if place is not None:
            if not isinstance(target[place], (dict, list)) or not target[place]:
                break
            target = target[place]
        places = list(target) if isinstance(target, dict) else range(len(target))
        if not places:
            return
        place = places[choices.number(0, len(places) - 1)]
    change = choices.one_of(_CHANGES)
    if change == "replace":
        target[place] = choices.leaf()
    elif change == "remove":
        del target[place]
    elif change == "wrap":
        target[place] = [target[place]]
    elif change == "text":
        target[place] = json.dumps(target[place])
    elif isinstance(target, list):
        target.insert(place, json.loads(json.dumps(target[place])))
    elif change == "rename":
        target[choices.one_of(_NAMES)] = target.pop(place)


@dataclass(frozen=True)
class Items:
    """What reading a file gave; a FormatError is among what was refused."""

    records: list[Record]
    refused: list[Refused | FormatError]


def check(format: Format, path: Path) -> list[Record]:
    """As `check_items`; returns the records."""
    return check_items(format, path).records


def check_items(format: Format, path: Path) -> Items:
    """Read the file, and write it again where the format has a way back: records and refusals, no other failure, and
    where nothing is refused the file comes out as it went in."""
    refused: list[Refused | FormatError] = []
    records: list[Record] = []
    trajectories: list[Trajectory] = []
    try:
        source = open_source(path)
        with suppress(FormatError):
            detect_source(source)
        for item in format.read(source):
            assert isinstance(item, (Record, Refused))
            if isinstance(item, Refused):
                refused.append(item)
                continue
            try:
                trajectories.append(stored(_completed(item, len(records) + 1)))
                records.append(item)
            except UsageError as error:  # as the import refuses it
                assert format.write is None
                refused.append(Refused(item.key, str(error)))
    except FormatError as error:
        refused.append(error)
    assert len({record.key for record in records}) == len(records)
    if trajectories:
        # In the writer's thread an error would be too late.
        encode_batch([_event(trajectory.steps, index) for index, trajectory in enumerate(trajectories)])
    if trajectories and format.write is not None:
        written = path.with_name("written")
        written.write_bytes(b"".join(format.write(iter(trajectories))))
        if not refused:
            values = source.rows if format.values is None else partial(format.values, source)
            rows = [row.value for row in values() if not isinstance(row, Refused)]
            again = [row.value for row in open_source(written).rows() if not isinstance(row, Refused)]
            assert difference(rows, again) == []
    return Items(records, refused)


def _completed(record: Record, row: int) -> Record:
    """As the import completes it."""
    begin: EpisodeFields = {
        **record.begin,
        "extra": {**(record.begin.get("extra") or {}), SOURCE_ROW: {"row": row, **record.source}},
    }
    return replace(record, begin=begin, source={})


def _event(steps: list[dict[str, Any]], index: int) -> Event:
    row = {name: value for name, value in (steps[-1] if steps else {}).items() if value is not None}
    return Event("step", "e", 0, index, 0, {name: row[name] for name in row.keys() - {"step_index", "timestamp"}})


def withstand(format: Format, rows: Sequence[Any], folder: Path, examples: int = 50) -> None:
    """`check` files that are mutations of these rows; some of them must come in."""
    path = folder / "mutated.json"
    came_in = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(value=mutations(rows))
    def one(value: Any) -> None:
        nonlocal came_in
        path.write_text(json.dumps(value))
        came_in += bool(check(format, path))

    one()
    assert came_in


def real_files(realdata: Path, folder: str) -> list[tuple[Path, int, int]]:
    """The files below a folder of the real data that hold episodes, and how many episodes and steps INDEX.tsv says."""
    with (realdata / "INDEX.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        (realdata / row["file"], int(row["episodes"]), int(row["steps_or_messages"] or 0))
        for row in rows
        if row["file"].startswith(f"{folder}/") and int(row["episodes"])
    ]


def check_real_file(format: Format, path: Path, episodes: int, steps: int, folder: Path) -> list[Record]:
    """`check` a real file, whole and cut off, and count. Returns the records."""
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    assert detect_source(open_source(copy)).name == format.name, path
    records = check(format, copy)
    assert (len(records), sum(len(record.steps) for record in records)) == (episodes, steps), path
    copy.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert len(check(format, copy)) < episodes, path
    return records
