"""Several servers used as one engine: membership tracks the servers, dispatch assigns requests, and server_pool
combines them and sends them new weights.
"""
