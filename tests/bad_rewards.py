"""Reward functions that misbehave, run for real by the pool's workers."""

import os
import time


def reward(response, payload):
    """Does what the response says."""
    match response:
        case "loop":
            while True:
                time.sleep(0.01)
        case "memory":
            return float(len(bytearray(8 << 30)) < 0)
        case "exit":
            os._exit(3)
        case "raise":
            raise KeyError("no such thing")
        case "text":
            return "x"
        case "two":
            return 2.0
        case "print":
            print("noise on stdout")
            return 1.0
    return float(response == payload["answer"])
