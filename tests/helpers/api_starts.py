"""Commands that a Trainer starts, where possible as forks of a process that has imported all of megatron-rl: in
milliseconds."""

import os
import sys
from pathlib import Path

import forks

KEPT = 30_000  # bytes of output that are handed on, which a pipe holds


class ForkedCommand:
    """What `api.process.start` gives, as far as it is used."""

    def __init__(self, words, output, directory: Path):
        directory.mkdir()
        self._files = (directory / "stdout", directory / "stderr")
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = forks.begin(forks._program, list(words), variables, *map(str, self._files))
        self._output = os.dup(output)
        self.pid, self.returncode = self._process.pid, None

    def poll(self):
        """Hands the output on when the process has ended."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            os.write(self._output, b"".join(file.read_bytes() for file in self._files)[-KEPT:])
            os.close(self._output)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        self._process.kill()
        self._process.join()
        self.poll()


def forked_start(directory: Path):
    """Makes an `api.process.start` that keeps its files in the directory."""

    def start(words, output):
        return ForkedCommand(words, output, directory / str(len(list(directory.iterdir()))))

    directory.mkdir()
    return start
