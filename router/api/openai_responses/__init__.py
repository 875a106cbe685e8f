"""OpenAI's Responses API, as another form of a chat completion.

1. `body` validates a request and turns it into a `ChatBody`.
2. The chat completion runs as usual. `router.endpoints.builders.openai_responses` builds the response.
3. `reply` has the models of responses and of the events of a stream, for `/openapi.json`.

Form: https://platform.openai.com/docs/api-reference/responses
"""
