"""Graders of answers, parsers of tags and verdicts (pure functions on text), and a pool of grading processes."""
