"""vLLM servers."""
