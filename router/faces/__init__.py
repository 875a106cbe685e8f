"""How clients come in: OpenAI's HTTP and gRPC, over the same code.

Both go through one `intake` (who may, and with what), and both take their answer from `serving`: admitted,
generated, piece by piece. `http_answer` writes it as one JSON object or as server-sent events.
"""
