"""The roots of Trajlake's errors; the full tree is drawn in trajlake.errors."""


class TrajlakeError(Exception):
    """Read the text: it says what happened and what to do."""


class UsageError(TrajlakeError):
    """Correct the call, as the text says."""


class SchemaError(UsageError):
    """Correct the value, or make the schema change one that is allowed."""
