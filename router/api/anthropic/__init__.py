"""Anthropic's Messages API, as another form of a chat completion.

1. `body` validates a request and turns it into a `ChatBody`.
2. The chat completion runs as usual. `router.endpoints.builders.anthropic` builds the response.
3. `reply` has the models of a message and of an error, for `/openapi.json`. It gives errors that form.

Form: https://platform.claude.com/docs/en/api/messages
"""
