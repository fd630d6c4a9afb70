"""The embedded engine: batched generation with a key/value cache inside the trainer's process, for CPU and one GPU
per rank."""
