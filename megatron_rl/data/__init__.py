"""Reads problems and prompt/response pairs from files, and makes those of the last-letter task."""
