"""How long tests wait for something that ends by itself: ten times what it takes on an idle machine with two cores.

A test that passes does not wait for the limit, and a smaller one only makes it fail on a busy machine.
"""

RUN_S = 2400.0  # a whole run, its ranks, its servers or its jobs: up to four minutes alone
PROCESS_S = 300.0  # a process that imports torch and does little: up to half a minute alone
