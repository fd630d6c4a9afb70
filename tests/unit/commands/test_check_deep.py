"""`megatron-rl check --deep` shows what a run would begin with, and refuses what its preflight would refuse."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from chats import CHATML, chat_tokenizer, said
from tiny_models import make_model

from megatron_rl.commands import check_trials
from megatron_rl.environments.environment import Environment
from megatron_rl.environments.episode_types import EpisodeEnd, NextRequest
from megatron_rl.main import main

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 1?", "answer": "2"}, {"question": "2?", "answer": "2"}]


@dataclass
class Talk(Environment):
    """Asks its agent until it has answered `answers` times, and rewards the number of its empty answers."""

    answers: int = 2

    def begin(self, task, seed):
        self.said = []
        return [NextRequest(agent="one", role="agent", messages=[said("user", f"Q: {task['question']}")])]

    def step(self, answer):
        self.said.append(answer.text)
        if len(self.said) == self.answers:
            return EpisodeEnd(rewards={"one": {"empty": float(self.said.count(""))}})
        return [NextRequest(agent="one", role="agent", messages=[said("user", "go on")])]


@pytest.fixture
def check(tmp_path, capsys):
    """Runs `check --deep` on a config of GRPO, or another recipe, with chats. Returns (status, output, errors)."""
    model = make_model(tmp_path / "model", num_hidden_layers=1, vocab_size=104, eos_token_id=2)
    chat_tokenizer(CHATML).save_pretrained(model)
    for name, rows in (("rows", ROWS), ("held", [*ROWS[:1], {"question": "3?", "answer": "3"}]), ("copy", ROWS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words, role="generator", recipe="recipe.target=grpo", deep=("--deep",)):
        own = [
            recipe, "recipe.args.updates=1", f"roles.{role}.model.path={model}", f"data.path={tmp_path}/rows.jsonl",
            "data.chat=true", f"evaluation.sets=[{{path: {tmp_path}/held.jsonl, chat: true}}]", "evaluation.every=1",
            f"run.dir={tmp_path}/runs", *words,
        ]  # fmt: skip
        status = main(["check", *own, *deep])
        return status, *capsys.readouterr()

    run.model = model
    return run


def test_it_shows_the_first_prompt_the_data_the_tokenizer_and_the_reward(check):
    status, told, errors = check()
    assert status == 0, errors
    for line in (
        "data: 1 of 3 problems repeat the question of another problem",
        "WARNING: 1 of 2 problems of evaluation.sets.held are in data, too",
        "data: the longest prompt has 25 tokens; roles.generator.max_prompt_tokens = ",
        "<|im_start|>user\\n1 + 1?<|im_end|>\\n<|im_start|>assistant\\n'",
        "104 rows in the model's embedding; answers end at '<|im_end|>' (2); pad none; a chat template",
        "reward: 1 for the first prompt's known answer, as '<answer>\\\\boxed{2}</answer>'; 0 for an empty answer",
    ):
        assert line in told, told
    assert "at which no answer ends" not in told


def test_it_names_the_end_of_turn_at_which_no_engine_stops(check):
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(check.model)
    config = json.loads((check.model / "config.json").read_text()) | {"eos_token_id": 0}
    (check.model / "config.json").write_text(json.dumps(config))
    (check.model / "generation_config.json").unlink(missing_ok=True)
    _, told, _ = check()
    assert "WARNING: the template ends a turn with '<|im_end|>' (2), at which no answer ends: name it in" in told
    _, told, _ = check("roles.generator.sampling.stop_strings=['<|im_end|>']")
    assert "at which no answer ends" not in told


def test_it_refuses_a_reward_that_agrees_with_everything_as_the_run_would(check):
    status, _, errors = check("reward.target=bad_rewards:agrees")
    assert status == 2 and "the reward gives 1.00 on average to 2 known wrong answers" in errors
    status, told, errors = check("reward.target=bad_rewards:agrees", "preflight.reward=false")
    assert status == 0, errors
    assert "1 for an empty answer. WARNING: an empty answer should earn less than a right one" in told
    status, told, errors = check("reward.target=bad_rewards:agrees", deep=("--deep", "--elsewhere"))
    assert status == 0, errors
    assert "reward:" not in told and "the first prompt" in told  # the reward is another machine's


def test_a_set_without_answers_is_refused_by_its_own_name(check, tmp_path):
    for name in ("rows", "held"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1?", "wanted": "2"}\n' * 3)
    for deep in ((), ("--deep",)):
        status, _, errors = check(deep=deep)
        assert status == 2, "a set of the evaluations is what the preflight tries"
        words = "a problem has no answer to try the reward with, only messages, question, wanted: set fields: {answer:"
        assert f"evaluation.sets: held: {words}" in errors
        assert "set fields: {answer: COLUMN} in this set" in errors
        status, _, errors = check("evaluation.sets=[]", deep=deep)
        assert status == 2 and "data: a problem has no answer to try the reward with" in errors
        assert check("preflight.reward=false", deep=deep)[0] == 0
        status, _, errors = check("data.fields={answer: wanted, wanted: wanted}", deep=deep)
        assert status == 0, errors


def test_it_refuses_a_metric_that_no_evaluation_has(check):
    for place in ("best", "early_stop"):
        status, told, errors = check(f"evaluation.{place}={{metric: generator/rewards}}")
        assert status == 2, told
        assert f"evaluation.{place}.metric = 'generator/rewards': the evaluation has no such metric" in errors
        assert "did you mean 'generator/reward'?" in errors and "generator/accuracy_greedy" in errors
        assert check(f"evaluation.{place}={{metric: accuracy}}")[0] == 2, "it has no role"
    for metric in ("generator/accuracy", "generator/pass@2", "generator/reward_greedy", "generator/ungraded"):
        status, _, errors = check(f"evaluation.best={{metric: {metric}}}", "evaluation.n=2", "evaluation.k=[1,2]")
        assert status == 0, errors


@pytest.mark.parametrize("name", ["rows", "copy"])
def test_faults_best_models_are_not_chosen_by_the_training_data(check, tmp_path, name):
    """`check` and `train` said nothing; `check --deep` warned."""
    sets = f"[{{path: {tmp_path}/{name}.jsonl, chat: true}}, {{path: {tmp_path}/held.jsonl, chat: true}}]"
    line = f"3 of 3 problems of evaluation.sets.{name} are in data, too"
    for deep in ((), ("--deep",)):
        _, told, _ = check(f"evaluation.sets={sets}", deep=deep)
        assert f"WARNING: {line}" in told and "WARNING: 1 of 2 problems of evaluation.sets.held are in data" in told
        for rule, metric in (("best", "generator/accuracy"), ("early_stop", f"generator/{name}/accuracy")):
            status, _, errors = check(f"evaluation.sets={sets}", f"evaluation.{rule}.metric={metric}", deep=deep)
            assert status == 2 and f"{line}, and evaluation.{rule} follows {metric}: evaluate on other" in errors
        assert check(f"evaluation.sets={sets}", "evaluation.best.metric=generator/held/accuracy", deep=deep)[0] == 0


def test_it_warns_of_a_text_that_the_reward_cannot_grade(check):
    status, told, errors = check("reward.target=bad_rewards:beyond", "preflight.reward=false")
    assert status == 0, errors
    assert "no score (returned -0.5: a reward returns a number in reward.range = [0, 1]) for an empty answer" in told
    assert "WARNING: a sample without a score is replaced, and teaches nothing" in told
    _, told, _ = check("reward.target=bad_rewards:beyond", "preflight.reward=false", "reward.range=[-0.5, 1]")
    assert "-0.5 for an empty answer" in told and "WARNING: a sample without" not in told


def test_it_plays_an_episode_with_empty_answers(check, monkeypatch):
    episodes = {
        "role": "agent",
        "recipe": "recipe={target: agents, args: {agents: {agent: 1}, environment: {target: 'test_check_deep:Talk'}, "
        "dialogue: chat, rewards: {empty: 1.0}}}",
    }
    status, told, errors = check("preflight.reward=false", **episodes)
    assert status == 0, errors
    assert "reward:" not in told  # the environment gives the rewards
    assert "the first prompt of an episode, to agent: " in told
    assert "'<|im_start|>user\\nQ: 1 + 1?<|im_end|>\\n<|im_start|>assistant\\n'" in told
    assert "an episode in which every answer is empty: agent/empty 2, episodes/answers 2" in told
    status, _, errors = check("preflight.reward=false", "evaluation.best.metric=agent/emty", **episodes)
    assert status == 2 and "did you mean 'agent/empty'?" in errors
    assert check("preflight.reward=false", "evaluation.best.metric=agent/empty", **episodes)[0] == 0
    monkeypatch.setattr(check_trials, "MOST_ANSWERS", 10)
    _, told, _ = check("preflight.reward=false", "recipe.args.environment.args.answers=20", **episodes)
    assert "WARNING: it fails: the episode does not end after 10 empty answers" in told


def test_faults_an_episode_whose_first_prompt_does_not_fit_is_refused_with_numbers(check):
    episodes = {
        "role": "agent",
        "recipe": "recipe={target: agents, args: {agents: {agent: 1}, environment: {target: 'test_check_deep:Talk'}, "
        "dialogue: chat, system: {agent: 'Be brief and kind to everybody.'}, rewards: {empty: 1.0}}}",
    }
    status, told, errors = check("preflight.reward=false", "roles.agent.max_prompt_tokens=30", **episodes)
    assert status == 2, told
    assert "a prompt of agent 'one' has " in errors and "and roles.agent.max_prompt_tokens = 30" in errors
    assert " 0 tokens" not in told + errors
