"""The fields that clients send and receive: OpenAI's and Anthropic's, and vLLM's beside them.

Life of a request here:

1. A body is validated (`validation`) into a model of `bodies`, which is made of `sampling`, `fields`,
   `messages` and `structured`. A gRPC message becomes the same model. Fields that Baton does not have are
   refused.
2. The bodies of OpenAI's Responses API (`openai_responses`) and of Anthropic's Messages API (`anthropic`)
   become chat completions. The errors of that chat completion get the names of their fields (`validation`).
3. `jobs` makes one `Job` for each choice: token ids and sampling parameters.

`responses` has the models of the main responses. `openapi` describes both.
"""
