"""How Baton runs processes: one way for all of its packages. README.md has the rules."""
