"""What clients write and read: OpenAI's and vLLM's fields, and nothing of how they are served.

A body is validated into one of the models of `bodies` (made of `fields`, `messages`, `structured` and
`router.tools`), becomes `jobs`, token ids only, and comes back as one of the models of `replies`, filled by
`answers`. `openapi` is made from these models.
"""
