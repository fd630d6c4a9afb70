"""The SGLang engine: client, server start, and the code that runs inside the server."""
