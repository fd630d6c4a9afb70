"""The vLLM engine: client, server start, and the code that runs inside the server."""
