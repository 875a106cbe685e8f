"""Conversion between text and tokens. Behind the router there are only tokens.

- `model_files` finds and reads the tokenizer files of a model, and `tokenizer` loads them.
- `chat` renders the messages of a chat as one text. It turns the text into tokens, and keeps those of earlier
  turns.
- `detokenizer` turns tokens back into text as they arrive, and finds stop strings.
"""
