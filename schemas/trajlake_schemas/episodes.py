"""The `episodes` table: one row an episode, small and flat, with the place of its steps."""

import pyarrow as pa

from trajlake_schemas.column import Column, TableSchema, struct_of
from trajlake_schemas.steps import TIMESTAMP

STATUSES = ("completed", "truncated", "aborted", "failed")
FAILURE_STAGES = ("planning", "tool_call", "validation", "environment", "timeout", "budget", "other")
REWARD_KINDS = ("verifiable", "judged")

# Late scores of these names are the episode's own reward and success (1 or 0), not only components of its reward.
SCORED_REWARD = "reward"
SCORED_SUCCESS = "success"

REWARD_COMPONENT = (
    Column("name", pa.string(), "The component's name, e.g. `format` or `unit_tests`."),
    Column("value", pa.float64(), "The component's value."),
    Column("weight", pa.float64(), "Its weight in `reward`.", null="not weighted"),
    Column("kind", pa.string(), "`verifiable` (a program checked it) or `judged` (a model or person did)."),
)

BEGIN: tuple[Column, ...] = (
    Column("group_id", pa.string(), "Shared by all rollouts of one prompt."),
    Column("task_id", pa.string(), "The task that was tried."),
    Column("task_family", pa.string(), "The benchmark or environment family that the task is from."),
    Column("domain", pa.string(), "The task's domain, e.g. `airline`."),
    Column("difficulty", pa.string(), "The task's difficulty as the source names it."),
    Column("trial", pa.int64(), "Which trial of the task this is, from 0."),
    Column("seed", pa.int64(), "The seed of the environment."),
    Column("env_name", pa.string(), "The environment, e.g. `CartPole-v1`."),
    Column("env_version", pa.string(), "The environment's version."),
    Column("env_snapshot", pa.string(), "What the environment was started from: an image digest, a state hash."),
    Column("policy_name", pa.string(), "The policy or model that acted."),
    Column("policy_version", pa.string(), "The policy's version at the start, e.g. a training step."),
    Column("agent_name", pa.string(), "The scaffold around the policy."),
    Column("agent_version", pa.string(), "The scaffold's version."),
    Column("parent_episode_id", pa.string(), "The episode that started this one.", null="none"),
    Column(
        "source_format",
        pa.string(),
        "The foreign format that the episode was imported from.",
        null="recorded by a writer",
    ),
    Column(
        "source_hash",
        pa.string(),
        "SHA-256 of the file that the episode was imported from.",
        null="recorded by a writer",
    ),
    Column("tags", pa.map_(pa.string(), pa.string()), "The user's own labels.", null="none"),
    Column("extra", pa.string(), "JSON text: what the source had that no column holds.", null="nothing"),
)

OUTCOME: tuple[Column, ...] = (
    Column("status", pa.string(), "completed, truncated, aborted or failed.", null="never"),
    Column("terminated", pa.bool_(), "Gymnasium: a final state was reached."),
    Column("truncated", pa.bool_(), "Gymnasium: the episode was cut off from outside."),
    Column("stop_reason", pa.string(), "Why it ended, in the source's words."),
    Column("success", pa.bool_(), "Whether the task was solved.", null="not judged"),
    Column(
        "reward",
        pa.float64(),
        "The reward of the whole episode.",
        null="not scored, which is neither 0.0 nor NaN",
    ),
    Column("rewards", pa.list_(struct_of(REWARD_COMPONENT)), "The reward's named components.", null="none"),
    Column(
        "failure_stage",
        pa.string(),
        "Where it failed: planning, tool_call, validation, environment, timeout, budget, other.",
    ),
    Column("failure_detail", pa.string(), "What failed, in a sentence."),
)

EPISODES = TableSchema(
    "episodes",
    1,
    "one episode; an episode exists when its row here does",
    (
        Column("episode_id", pa.string(), "Unique in the lake.", null="never", required=True),
        Column(
            "attempt",
            pa.int32(),
            "Which sending of the episode this is, from 0; the later complete one wins.",
            null="never",
            required=True,
        ),
        Column("run_id", pa.string(), "The run that recorded it.", null="never", required=True),
        Column("worker_id", pa.string(), "The worker that recorded it.", null="never", required=True),
        Column(
            "epoch",
            pa.int32(),
            "The worker's epoch: which start of its process.",
            null="never",
            required=True,
        ),
        *BEGIN[:15],
        Column("started_at", TIMESTAMP, "When it began, by the worker's clock."),
        Column(
            "ended_at",
            TIMESTAMP,
            "When it ended, by the worker's clock.",
            null="it never ended, or the source did not say",
        ),
        *OUTCOME,
        Column("n_steps", pa.int32(), "Steps.", null="never", unit="step", required=True),
        Column("n_tool_calls", pa.int32(), "Tool calls.", null="never", required=True),
        Column("n_tool_errors", pa.int32(), "Tool results that are errors.", null="never", required=True),
        Column("prompt_tokens", pa.int64(), "Sum over the steps.", null="no step says", unit="token"),
        Column("completion_tokens", pa.int64(), "Sum over the steps.", null="no step says", unit="token"),
        Column("cached_tokens", pa.int64(), "Sum over the steps.", null="no step says", unit="token"),
        Column("cost_usd", pa.float64(), "Sum over the steps.", null="no step says", unit="US dollar"),
        Column(
            "wall_ms",
            pa.float64(),
            "From `started_at` to `ended_at`.",
            null="one of them is unknown",
            unit="millisecond",
        ),
        Column(
            "content_hash",
            pa.string(),
            "Hash of what was done and seen (messages, calls, results, tensors), without ids and times.",
            null="never",
        ),
        Column(
            "duplicate_of",
            pa.string(),
            "The episode whose content this one repeats.",
            null="not known to repeat another",
        ),
        Column("retracted", pa.string(), "Why the episode must not be used.", null="it may be used"),
        Column(
            "token_audit",
            pa.string(),
            "What is wrong with token ids, mask and logprobs, e.g. lengths that differ.",
            null="nothing, or no tokens",
        ),
        *BEGIN[15:],
        Column(
            "restore",
            pa.string(),
            "JSON text: column to original value, where the column cannot hold it.",
            null="every value is as the source had it",
        ),
        Column(
            "steps_path",
            pa.string(),
            "The file of table `steps` that holds the steps.",
            null="it has no steps",
        ),
        Column(
            "row_group",
            pa.int32(),
            "The row group in that file; of a very large episode the first of several.",
            null="it has no steps",
        ),
        Column("row_offset", pa.int32(), "The first row in that row group.", null="it has no steps", unit="row"),
        Column("row_count", pa.int32(), "Rows from there on; equals `n_steps`.", null="it has no steps", unit="row"),
    ),
)
