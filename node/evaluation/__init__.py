"""Judging versions and verdicts: held-out evaluation, difficulty, limits, replay of verdicts, intervals."""
