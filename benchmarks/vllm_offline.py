"""vLLM without a server: answers rounds of requests, a JSON line each on standard input, with what they took.

Run by vLLM's interpreter.

The first line holds the arguments of `vllm.LLM`, each further one a round: {"prompts": [token ids], "seeds": [one per
prompt], "sampling": {...}}. Every line is answered with one: {"seconds", "tokens"}; the first when the engine is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def play(llm: Any, requests: dict[str, Any]) -> dict[str, float]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in requests["prompts"]]
    settings = [SamplingParams(**requests["sampling"], seed=seed) for seed in requests["seeds"]]
    start = time.perf_counter()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes its log to standard output
    from vllm import LLM

    llm = LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"seconds": 0.0, "tokens": 0}), file=answers)
    for line in sys.stdin:
        print(json.dumps(play(llm, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
