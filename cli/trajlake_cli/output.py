"""Commands compute rows; an Output shows them: as a table for people, as JSON, JSON lines or CSV for programs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajlake_cli.text import neutralise, one_line
from trajlake_cli.values import field, json_text

Row = Mapping[str, Any]

FORMATS = ("table", "json", "jsonl", "csv")


@dataclass(frozen=True)
class Output:
    """Shows rows on standard output in one format; whatever else a person should know goes to standard error."""

    format: str

    @property
    def is_table(self) -> bool:
        """Whether a person reads it, so that columns may be left out and texts be cut."""
        return self.format == "table"

    def rows(
        self, rows: Iterable[Row], columns: Sequence[str], expendable: Sequence[str] = (), keys: Sequence[str] = ()
    ) -> None:
        """Show `columns` of every row, in this order. A narrow table leaves `expendable` ones out, the first first,
        before it cuts `keys`, by which rows are told apart."""
        if self.format == "json":
            self._json(rows, columns)
        elif self.format == "jsonl":
            for row in rows:
                self._write(json_text(_pick(row, columns), ascii_only=_ascii_only()) + "\n")
        elif self.format == "csv":
            self._csv(rows, columns)
        else:
            from trajlake_cli.tables import print_table

            print_table(list(rows), columns, expendable, keys)

    def _json(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        """A list with one object a line, written as the rows come."""
        before = "[\n"
        for row in rows:
            self._write(before + json_text(_pick(row, columns), ascii_only=_ascii_only()))
            before = ",\n"
        self._write("[]\n" if before == "[\n" else "\n]\n")

    def _csv(self, rows: Iterable[Row], columns: Sequence[str]) -> None:
        on_terminal = sys.stdout.isatty()
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([neutralise(name) for name in columns] if on_terminal else columns)
        for row in rows:
            fields = [field(row.get(column)) for column in columns]
            writer.writerow([neutralise(text) for text in fields] if on_terminal else fields)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)


def say(text: str) -> None:
    """One line for the person at the terminal, on standard error: rows on standard output stay clean."""
    sys.stdout.flush()
    print(one_line(text), file=sys.stderr)  # noqa: T201


def frame_rows(frame: Any) -> Iterator[Row]:
    """The rows of a polars DataFrame as dicts; a map column (`tags`) as a dict too."""
    maps = [name for name in frame.columns if name == "tags"]
    for row in frame.iter_rows(named=True):
        for name in maps:
            if isinstance(row[name], list):
                row[name] = {entry["key"]: entry["value"] for entry in row[name]}
        yield row


def _pick(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    return {column: row.get(column) for column in columns}


def _ascii_only() -> bool:
    return (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
