"""Stands in for verifiers_host.py: plays episodes by rote against the token route, and goes wrong as its task says.

The environment's setting `plays` names what the task at each place does. It imports nothing but Python's own library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

SLEEP = "import time; time.sleep(600)"


class Plays:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def ask(self, session: str, role: str, tokens: list[int], **sampling: Any) -> list[int]:
        """Posts what the library's own client posts -> the tokens of the answer."""
        params = {"stop_token_ids": [0], "logprobs": 1, "skip_special_tokens": False, **sampling}
        body = json.dumps({"model": role, "token_ids": tokens, "sampling_params": params}).encode()
        headers = {"Authorization": f"Bearer {self.settings['token']}", "X-Session-ID": session}
        url = f"{self.settings['url']}/inference/v1/generate"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def single(self, request: dict[str, Any]) -> list[Any]:
        """Each agent answers a prompt of its own."""
        traces = []
        for agent, role in self.settings["agents"].items():
            prompt, session = [request["task"] + 1, 2], request["session"] + agent
            completion = self.ask(session, role, prompt)
            branch = {"tokens": [*prompt, *completion], "sampled": [[2, 2 + len(completion), True]]}
            traces.append(trace(session, agent, [branch], right=float(len(completion))))
        return traces

    def branches(self, request: dict[str, Any]) -> list[Any]:
        """One answer goes on in two ways, so that two sequences share it."""
        agent, role = next(iter(self.settings["agents"].items()))
        session, prompt, branches = request["session"] + agent, [1, 2], []
        first = self.ask(session, role, prompt)
        shared = [*prompt, *first]
        for place, user in enumerate((3, 4)):
            completion = self.ask(session, role, [*shared, user, 5])
            tokens, start = [*shared, user, 5, *completion], len(shared) + 2
            branches.append({"tokens": tokens, "sampled": [[2, len(shared), place == 0], [start, len(tokens), True]]})
        return [trace(session, agent, branches, right=1.0)]

    def lie(self, request: dict[str, Any]) -> list[Any]:
        """Changes one token of what was sampled."""
        traces = self.single(request)
        traces[0]["branches"][0]["tokens"][-1] += 1
        return traces

    def untrained(self, request: dict[str, Any]) -> list[Any]:
        traces = self.single(request)
        return [{**traces[0], "trained": False}, *traces[1:]]

    def fail(self, request: dict[str, Any]) -> list[Any]:
        raise RuntimeError("the task's reward broke")

    def slow(self, request: dict[str, Any]) -> list[Any]:
        raise TimeoutError

    def die(self, request: dict[str, Any]) -> list[Any]:
        """Leaves a child with a session of its own behind."""
        os.environ.update(self.settings["mark"])
        child = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
        Path(self.settings["environment"]["child"]).write_text(str(child.pid))
        print("no memory left", file=sys.stderr, flush=True)
        os._exit(7)

    def hang(self, request: dict[str, Any]) -> list[Any]:
        Path(self.settings["environment"]["child"]).touch()  # tells that it has begun
        time.sleep(600)
        return []

    def stray(self, request: dict[str, Any]) -> list[Any]:
        print(json.dumps({"session": 99, "why": None, "traces": []}), flush=True)
        return self.hang(request)

    def babble(self, request: dict[str, Any]) -> list[Any]:
        print("hello", flush=True)
        return self.hang(request)


def trace(session: str, agent: str, branches: list[Any], **rewards: float) -> dict[str, Any]:
    return {
        "session": session, "agent": agent, "trained": True, "rewards": rewards, "metrics": {"seen": 1.0},
        "turns": sum(len(branch["sampled"]) for branch in branches), "tool_calls": 0, "branches": branches,
    }  # fmt: skip


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    plays, lock = Plays(settings), threading.Lock()
    if settings["environment"].get("refuses"):
        sys.exit("there is no such task set")

    def say(line: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(line), flush=True)

    def one(request: dict[str, Any]) -> None:
        verb = settings["environment"]["plays"][request["task"]]
        try:
            say({"session": request["session"], "why": None, "traces": getattr(plays, verb)(request)})
        except TimeoutError:
            say({"session": request["session"], "timeout": True, "why": "late"})
        except Exception as error:
            say({"session": request["session"], "timeout": False, "why": str(error)})

    say({"ready": True})
    for line in sys.stdin:
        threading.Thread(target=one, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
