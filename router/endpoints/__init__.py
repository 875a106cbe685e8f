"""The servers for clients: the HTTP APIs of OpenAI and Anthropic, and gRPC.

Life of a request here:

1. `http_server` or `grpc_server` receives it.
2. `Frontend.authorize` checks the API key, `admit` the limits, and `prepare` makes an `ActiveRequest` of the
   bytes.
3. `http_generation` or, for a response that is kept, `http_openai_responses` calls them for HTTP.
4. `answers` takes the deltas of the `ActiveRequest`. `builders` make messages of gRPC, server-sent events or
   one JSON object of them.
"""
