"""Reads problems and prompt/response pairs from files and Hugging Face data sets, and generates problems."""
