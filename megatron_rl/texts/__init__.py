"""Texts and tokens: tokenizers, chat templates, and the forms in which models write thoughts and calls."""
