"""The expert cache: who stays in memory, how experts get there, and who guesses what comes next."""
