"""Between text and tokens, at the edge of the router: nothing behind it knows text.

`model_files` finds a model's files, `tokenizer` reads them; a `chat_template` makes one text of a chat's
messages; the `detokenizer` turns tokens back, as they come.
"""
