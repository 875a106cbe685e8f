"""The life of one generation, from a prompt to its last token, through whatever happens to workers.

It asks for a prefill and a decode at a time (`attempt`), emits each token once (`emit`) into its answer
(`output`, `outbox`, `choice`), and begins again from what was emitted when a worker fails: as often as
`strikes` allow, when the `retry_budget` lets it (`retries`). What it has to wait for is in `waiting` and
`room`.
"""
