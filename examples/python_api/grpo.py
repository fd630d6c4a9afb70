"""GRPO on rows of one's own, in seconds on a CPU: `python examples/python_api/grpo.py`."""

from megatron_rl import Trainer
from megatron_rl.data.tiny import write_tiny_model

rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a poem", "a song", "a tale", "a rhyme")]


def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in c[0]["content"]) / 8 for c in completions]


settings = {"updates": 12, "group_size": 8, "prompts_per_iteration": 4, "max_tokens": 8, "lr": 3e-3}
result = Trainer(write_tiny_model("runs/tiny/model"), vowels, rows, **settings).train()
print("reward of each update:", [round(value, 2) for value in result.column("reward/trained")])
