"""Several servers used as one engine: membership tracks the servers, dispatch assigns requests, server_refits sends new
weights, and server_pool combines them.
"""
