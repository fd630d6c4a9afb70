"""A task set and an environment of verifiers whose agents speak at the same time, without a program of their own.

A speaker answers twice. Three listeners hear its last answer behind words that stand in Python's order of a set; each
of them answers twice, after waits by chance, so that they are done in another order every time.
"""

import asyncio
import random

import httpx
import verifiers.v1 as vf

WORDS = ("one", "uno", "eins", "un", "I", "think")
LISTENERS = 3
LONGEST_WAIT_S = 0.04


class CrowdTask(vf.Task[vf.TaskData]):
    pass


class CrowdConfig(vf.TasksetConfig):
    pass


class CrowdTaskset(vf.Taskset[CrowdTask, CrowdConfig]):
    def load(self) -> list[CrowdTask]:
        return [CrowdTask(vf.TaskData(prompt=word)) for word in WORDS]


class QuickConfig(vf.HarnessConfig):
    pass


class QuickHarness(vf.Harness[QuickConfig]):
    """Asks from within verifiers' own process, where other harnesses start a program for every turn."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:  # fmt: skip
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as client:
            for _ in range(2):
                await asyncio.sleep(random.random() * LONGEST_WAIT_S)
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "think"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class CrowdEnvConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    listener: vf.AgentConfig = vf.AgentConfig()


class CrowdEnv(vf.Env[CrowdEnvConfig]):
    async def run(self, task, agents) -> None:
        speaker = await agents.speaker.run(task)
        heard = f"{' '.join({*WORDS})} {speaker.last_reply}"
        await asyncio.gather(*(agents.listener.run(vf.Task(vf.TaskData(prompt=heard))) for _ in range(LISTENERS)))

    async def finalize(self, task, episode) -> None:
        for trace in episode.traces:
            trace.record_reward("small", float(sum(letter.islower() for letter in trace.last_reply or "")))


__all__ = ["CrowdEnv", "CrowdTaskset", "QuickHarness"]
