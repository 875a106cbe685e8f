"""Declares every option of every command once. `parameters` turns them into flags, variables and file keys.

An option has its vLLM name if vLLM has the option. A group holds options that several commands share, or that
`--help` shows together. `baton serve` passes groups to the roles that it starts.
"""
