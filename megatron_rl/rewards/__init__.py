"""Grades answers and parses tags and verdicts, by pure functions on text; and runs graders in a pool of workers."""
