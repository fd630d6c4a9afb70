"""Takes everything that was imported so far out of the garbage collector's sight, in this process and in its forks: a
collection walks half a million objects of libraries otherwise, and each fork copies their pages."""

import gc

gc.collect()
gc.freeze()
