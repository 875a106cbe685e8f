"""The life of one generation, from the prompt to the last token, through failures of workers.

1. A `generation` gets a `Job`: the token ids of a prompt and the sampling parameters.
2. It asks one prefill and one decode worker (`attempt`).
3. `emit` makes sure that each output token is emitted exactly once. `token_writer` puts it into the
   `token_queue` of the request and measures latency. There `choice` turns tokens into text.
4. If a worker fails, it starts new attempts from prompt + output. `failure_count` ends that after too many
   failures, and `waits` bounds the waits for a worker, for retry budget, and in all.
"""
