"""The desk: a small world with tools in it, tasks with a verifier, and a scripted agent that errs.

`tools` act on a `World`; `tasks` makes tasks, each with a plan and the state that it must end in; `agent` follows
the plan with the habits of its policy version; `rollout` plays one task as steps.
"""
