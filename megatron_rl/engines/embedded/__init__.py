"""The embedded engine: batched generation with a KV cache inside the trainer's process, on CPU or with one GPU per
rank.
"""
