"""Reward functions that grade answers, parsers of tags and verdicts in texts, and a pool of grading processes."""
