"""The fields that clients send and receive: OpenAI's and Anthropic's, and vLLM's beside them.

Life of a request here:

1. A body is validated (`validation`) into a model of `bodies`, which is made of `sampling`, `fields`,
   `messages`, `structured` and `tools`. A gRPC message becomes the same model (`grpc_body`). `unsupported`
   refuses fields that Baton does not have.
2. The bodies of OpenAI's Responses API (`openai_responses`) and of Anthropic's Messages API (`anthropic`)
   become chat completions. `chat_names` gives the errors of that chat completion the names of their fields.
3. `jobs` makes one `Job` for each choice: token ids and sampling parameters.

`responses` has the models of responses. `openapi` describes both.
"""
