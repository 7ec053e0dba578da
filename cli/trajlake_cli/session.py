"""What the commands of one invocation share: the lake's address, and what to say after Ctrl-C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trajlake import Lake, Snapshot

AGAIN = "run the same command again"


@dataclass
class Session:
    """`uri` is the lake's address from --lake or TRAJLAKE_LAKE. `interrupted` says what to do after Ctrl-C."""

    uri: str | None = None
    interrupted: str = AGAIN

    def require_uri(self) -> str:
        """The lake's address. Raises a usage error with an example where there is none."""
        if not self.uri:
            raise click.UsageError(
                "which lake? Give --lake ADDRESS or set TRAJLAKE_LAKE: a folder (./lake) or s3://bucket/lake",
                click.get_current_context(silent=True),
            )
        return self.uri

    def lake(self) -> Lake:
        """The lake, connected. Raises LakeMissing where there is none."""
        uri = self.require_uri()
        import trajlake
        from trajlake.processes import leave_pandas_out

        leave_pandas_out()
        return trajlake.connect(uri)

    def snapshot(self, token: str | None) -> Snapshot:
        """The newest snapshot, or the one that `token` names."""
        return self.lake().snapshot(token)


pass_session = click.make_pass_decorator(Session, ensure=True)
