"""A server that talks to a process of its own through shared memory and a semaphore, as vLLM's do.

Arguments: a file that gets the names of what it made in /dev/shm; `deaf` where it ignores the word to leave.
"""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path


def sit(lock, name):
    memory = shared_memory.SharedMemory(name)
    with lock:
        memory.buf[0] = 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def main():
    names_before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    memory, lock = shared_memory.SharedMemory(create=True, size=1000), context.Lock()
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context.Process(target=sit, args=(lock, memory.name), daemon=True).start()
    while memory.buf[0] == 0:
        time.sleep(0.01)
    names = [memory.name, *(n for n in set(os.listdir("/dev/shm")) - names_before if n.startswith("sem."))]
    draft = Path(sys.argv[1] + ".draft")
    draft.write_text("\n".join(names))
    draft.rename(sys.argv[1])
    time.sleep(600)


if __name__ == "__main__":
    main()
