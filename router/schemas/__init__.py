"""JSON schemas of clients in the form that the grammar compiler enforces.

    schema ─▶ rewriter ─▶ an equal schema of keywords that the compiler knows ─▶ compiler
                 └──────▶ the places that cannot be enforced: refused under `strict`, else named to the client

`rewriter` walks a schema. `places` follows references, `disjoint` proves that no value has two schemas,
`negation` writes the opposite of a schema, `lookahead` takes a regular expression apart. All is pure and
bounded; only `Probe` asks the compiler.
"""
