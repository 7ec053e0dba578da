"""The `steps` table: one row a step. Names follow ATIF for agent content and Gymnasium for RL content."""

import pyarrow as pa

from trajlake_schemas.column import Column, TableSchema, struct_of

SOURCES = ("system", "user", "agent", "tool", "environment")
ARGUMENTS_KINDS = ("string", "object")

TIMESTAMP = pa.timestamp("us", tz="UTC")

TOOL_CALL = (
    Column("id", pa.string(), "The call's id, which its result repeats as `call_id`."),
    Column("name", pa.string(), "The tool's name."),
    Column("arguments", pa.string(), "The arguments exactly as the source wrote them, as text."),
    Column(
        "arguments_kind",
        pa.string(),
        "`string` where the source held text (often JSON in a string), `object` where it held a JSON value.",
    ),
)
TOOL_RESULT = (
    Column("call_id", pa.string(), "The id of the call that this answers."),
    Column("content", pa.string(), "What the tool returned, as text."),
    Column("is_error", pa.bool_(), "Whether the tool reported an error."),
)
CONTENT_PART = (
    Column("type", pa.string(), "The part's kind as the source names it: `text`, `image_url`, `input_audio`, …"),
    Column("text", pa.string(), "The part's text."),
    Column("media_type", pa.string(), "The media type of `data`, e.g. `image/png`."),
    Column("uri", pa.string(), "Where the content lies, if not here."),
    Column("data", pa.binary(), "The content itself."),
    Column("extra", pa.string(), "JSON text: what the part had that no field holds."),
)
TENSOR = (
    Column("name", pa.string(), "`observation`, `action`, `final_observation`, or the user's own name."),
    Column(
        "dtype", pa.string(), "numpy's name of the element type (`float32`, `bool`, …), or ml_dtypes' (`bfloat16`, …)."
    ),
    Column("shape", pa.list_(pa.int64()), "The lengths of the axes; empty for a scalar."),
    Column("data", pa.binary(), "The elements in C order, little-endian."),
)

STEP_CONTENT: tuple[Column, ...] = (
    Column(
        "parent_step",
        pa.int32(),
        "`step_index` of the step that this one follows, where the conversation forks; -1 where it follows none.",
        null="the previous step",
        unit="step",
    ),
    Column("source", pa.string(), f"Who acted: {', '.join(SOURCES)}."),
    Column("timestamp", TIMESTAMP, "When the step happened, by the source's clock."),
    Column("message", pa.string(), "The text of the message.", null="no text at all, which is not the empty text"),
    Column("content_parts", pa.list_(struct_of(CONTENT_PART)), "A multi-modal message's parts.", null="text only"),
    Column("reasoning", pa.string(), "The agent's reasoning, where it is apart from the message."),
    Column("tool_calls", pa.list_(struct_of(TOOL_CALL)), "The tool calls that the agent made.", null="none"),
    Column("tool_results", pa.list_(struct_of(TOOL_RESULT)), "What the tools returned.", null="none"),
    Column("reward", pa.float64(), "The reward of this step.", null="not scored, which is neither 0.0 nor NaN"),
    Column("terminated", pa.bool_(), "Gymnasium: the environment reached a final state."),
    Column("truncated", pa.bool_(), "Gymnasium: the episode was cut off from outside (a time limit)."),
    Column("tensors", pa.list_(struct_of(TENSOR)), "Observations and actions of classic RL.", null="none"),
    Column("token_ids", pa.list_(pa.int32()), "The sampled or prompted tokens of this step."),
    Column("loss_mask", pa.list_(pa.int8()), "1 where the token is trained on, 0 elsewhere; beside `token_ids`."),
    Column(
        "logprobs",
        pa.list_(pa.float32()),
        "Log-probabilities of the tokens under the policy that sampled them.",
        unit="nat",
    ),
    Column("policy_version", pa.string(), "The policy that produced this step.", null="as the episode says"),
    Column("model", pa.string(), "The model that produced this step."),
    Column("prompt_tokens", pa.int64(), "Tokens of the prompt.", unit="token"),
    Column("completion_tokens", pa.int64(), "Tokens that were generated.", unit="token"),
    Column("cached_tokens", pa.int64(), "Tokens of the prompt that were served from a cache.", unit="token"),
    Column("cost_usd", pa.float64(), "What the step cost.", unit="US dollar"),
    Column("latency_ms", pa.float64(), "How long the step took.", unit="millisecond"),
    Column(
        "is_copied_context",
        pa.bool_(),
        "ATIF: the step repeats context from elsewhere and is not to be trained on.",
    ),
    Column("error", pa.string(), "The error that this step ended with.", null="no error"),
    Column("extra", pa.string(), "JSON text: what the source had that no column holds.", null="nothing"),
    Column(
        "restore",
        pa.string(),
        "JSON text: column path to original value, where Arrow cannot hold it (lone surrogates, integer ids).",
        null="every value is as the source had it",
    ),
)

STEPS = TableSchema(
    "steps",
    1,
    "one step of an episode; the steps of an episode are contiguous and in order",
    (
        Column("episode_id", pa.string(), "The episode that the step belongs to.", null="never", required=True),
        Column(
            "step_index",
            pa.int32(),
            "0, 1, 2, … in the order of recording.",
            null="never",
            unit="step",
            required=True,
        ),
        *STEP_CONTENT,
    ),
)
