"""Which settings, and how fast: measure the machine, predict, plan, sweep, compare, tune; and keep a record of each run."""
