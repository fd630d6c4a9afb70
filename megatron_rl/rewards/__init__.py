"""Pure functions on text: grading answers, parsing tags and verdicts; and the worker pool that runs graders."""
