"""The forward pass and what it is made of. Read engine.py first."""
