"""OpenAI's Responses API, as another form of a chat completion.

1. `body` validates a request and turns it into a `ChatBody`.
2. The chat completion runs as usual. `router.endpoints.builders.openai_responses` builds the response.

Form: https://platform.openai.com/docs/api-reference/responses
"""
