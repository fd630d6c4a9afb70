"""The calculator against Python's own arithmetic, and the loop of a model that asks tools, driven by hand."""

import copy
import random
import re
import time
from fractions import Fraction

import pytest

from megatron_rl.config import plugins
from megatron_rl.config.base import ConfigError, Use
from megatron_rl.contrib.calculator import Calculator
from megatron_rl.environments.episode_types import Call, EnvironmentFailure, EpisodeEnd, Said
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import SandboxFailure
from megatron_rl.texts.text import fill, read_template
from megatron_rl.types import Stop

CALCULATOR = "megatron_rl.contrib.calculator:Calculator"
TOOL_TASK = "megatron_rl.environments.tool_task:ToolTask"
PYTHON = "megatron_rl.environments.python_tool:PythonTool"
ECHO, FLAKY = "task_tools:Echo", "task_tools:Flaky"


def calculate(expression, **settings):
    return Calculator(**settings).run({"expression": expression})


def random_expression(rng, depth, operators):
    if depth == 0 or rng.random() < 0.2:
        return str(rng.randint(0, 99))
    left, right = (random_expression(rng, depth - 1, operators) for _ in range(2))
    sign = rng.choice(["", "", "-", "+"])
    return f"{sign}({left} {rng.choice(operators)} {right})"


def test_whole_numbers_are_those_of_python():
    rng = random.Random(1)
    for _ in range(200):
        expression = random_expression(rng, 4, ["+", "-", "*", "//", "%"])
        try:
            known = str(eval(expression))
        except ZeroDivisionError:
            known = "error: division by zero"
        assert calculate(expression) == known, expression


def test_divisions_are_those_of_fractions():
    rng = random.Random(2)
    for _ in range(200):
        expression = random_expression(rng, 3, ["+", "-", "*", "/"])
        try:
            known = eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression))
        except ZeroDivisionError:
            assert calculate(expression) == "error: division by zero"
            continue
        found = Fraction(calculate(expression))
        ends = not re.sub(r"[25]", "", "".join(map(str, factors(known.denominator))))
        assert found == known if ends else abs(found - known) <= abs(known) * Fraction(1, 10**14), expression


def factors(number):
    found, each = [], 2
    while number > 1:
        while number % each == 0:
            found.append(each)
            number //= each
        each += 1
    return found


@pytest.mark.parametrize(
    "expression, known",
    [
        ("0.1 + 0.2", "0.3"),
        ("0.1234567890123456789 * 10", "1.234567890123456789"),
        ("1/3", "0.333333333333333"),
        ("7 / 2", "3.5"),
        ("10 / 5", "2"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("-2 ** 2", "-4"),
        ("2 ** -2", "0.25"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("(-1) ** 99999999999", "-1"),
        ("0 ** 0", "1"),
        ("1e3 + .5", "1000.5"),
        ("1e-40", "1E-40"),
        (" 3 * (4\n+ 5) ", "27"),
        ("1 / 2 ** 10", "0.0009765625"),
    ],
)
def test_numbers_as_they_are_written_and_shown(expression, known):
    assert calculate(expression) == known


@pytest.mark.parametrize(
    "expression, says",
    [
        ("9**9**9", "more than 200 digits"),
        ("(((9**99)**99)**99)**99", "more than 200 digits"),
        ("1/9**9**9", "more than 200 digits"),
        ("9**-999999999999999999999", "more than 200 digits"),
        ("1e999999999", "more than 200 digits"),
        ("1e-99999999999999999999999", "more than 200 digits"),
        ("0e99999999", "more than 200 digits"),
        ("(1e150) ** 2.5", "more than 200 digits"),
        ("*".join(["9" * 40] * 6), "more than 200 digits"),
        ("1/0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("(0-8) ** (1/3)", "negative number"),
        ("2 ^ 3", "write **"),
        ("__import__('os').system('true')", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("1 < 2", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1,234", "only numbers"),
        ("1 +", "no arithmetic expression"),
        ("one", "only numbers"),
        ("1 \x00", "no arithmetic expression"),
        ("", "give an expression"),
        (None, "give an expression"),
        (7, "give an expression"),
        ("1" * 501, "longer than 500 characters"),
        ("-" * 490 + "1", ""),
        ("(" * 240 + "1" + ")" * 240, ""),
    ],
)
def test_mistakes_are_texts_and_come_at_once(expression, says):
    start = time.process_time()
    answer = calculate(expression)
    assert time.process_time() - start < 1.0
    assert (answer.startswith("error: ") and says in answer) or (not says and answer == "1")


def test_limits_of_the_calculator_are_checked():
    assert calculate("10**4", max_digits=4).startswith("error") and calculate("9999", max_digits=4) == "9999"
    for wrong in ({"max_digits": 0}, {"max_digits": 5000}, {"max_characters": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            plugins.build(Use(target=CALCULATOR, args=wrong))


def task(tmp_path, tools=(CALCULATOR,), **args):
    (tmp_path / "ask.txt").write_text("Q: {question}\n\n")
    settings = {"template": str(tmp_path / "ask.txt"), **args}
    return plugins.build(Use(target=TOOL_TASK, args={"tools": [named(tool) for tool in tools], **settings}))


def named(tool):
    return tool if isinstance(tool, dict) else {"target": tool}


def played(environment, texts, question="2 * 3?", **payload):
    """Plays an episode of tags. -> all requests, and the end."""
    own = copy.copy(environment)
    requests, texts = own.begin({"question": question, **payload}, 0), [*texts]
    seen = []
    while not isinstance(requests, EpisodeEnd):
        seen += requests
        said = texts.pop(0)
        requests = own.step(said if isinstance(said, Said) else Said(agent="agent", text=said, stop=Stop.STOP))
    assert not texts
    return seen, requests


def contents(requests):
    return [message["content"] for request in requests for message in request.messages]


def test_a_call_in_tags_is_answered_and_the_answer_ends_the_episode(tmp_path):
    texts = ["I compute <calculator> 2 * 3 </calculator>", "so <answer>6</answer>"]
    requests, over = played(task(tmp_path), texts)
    assert contents(requests) == ["Q: 2 * 3?\n", "\n<result>6</result>\n"]
    assert all(request.stop == ["</calculator>", "</answer>"] and not request.tools for request in requests)
    assert {(request.agent, request.role) for request in requests} == {("agent", "agent")}
    assert over.answers == {"agent": "\n".join(texts)} and over.rewards == {"agent": {"tool_calls": 1.0}}
    assert played(task(tmp_path, graded="last"), texts)[1].answers == {"agent": texts[1]}


def test_episodes_of_one_environment_do_not_mix(tmp_path):
    environment = task(tmp_path)
    first, second = copy.copy(environment), copy.copy(environment)
    first.begin({"question": "a"}, 0)
    second.begin({"question": "b"}, 1)
    first.step(Said(agent="agent", text="<calculator>1</calculator>", stop=Stop.STOP))
    over = second.step(Said(agent="agent", text="<answer>2</answer>", stop=Stop.STOP))
    assert over.answers == {"agent": "<answer>2</answer>"} and over.rewards == {"agent": {"tool_calls": 0.0}}


def test_after_the_last_call_only_an_answer_is_waited_for(tmp_path):
    call = "<calculator>1 + 1</calculator>"
    requests, over = played(task(tmp_path, max_calls=2), [call] * 3)
    assert [request.stop for request in requests][-1] == ["</answer>"] and len(requests) == 3
    assert over.rewards == {"agent": {"tool_calls": 2.0}} and over.answers == {"agent": "\n".join([call] * 3)}


@pytest.mark.parametrize("stop", [None, Stop.LENGTH])
def test_a_agents_that_is_cut_ends_with_what_it_has(tmp_path, stop):
    cut = Said(agent="agent", text="" if stop is None else "<calculator>1", stop=stop)
    _, over = played(task(tmp_path), ["<calculator>1</calculator>", cut])
    assert over.answers == {"agent": "<calculator>1</calculator>\n" + cut.text}


def test_a_text_without_tags_ends_the_episode_or_is_reminded(tmp_path):
    assert len(played(task(tmp_path), ["I do not know."])[0]) == 1
    reminded = task(tmp_path, reminder="\nTry again.\n", max_calls=2)
    requests, over = played(reminded, ["hm", "hm", "hm"])
    assert contents(requests)[1:] == ["\nTry again.\n"] * 2 and over.rewards == {"agent": {"tool_calls": 0.0}}


def test_the_content_of_a_tag_keeps_the_lines_of_a_program(tmp_path):
    environment = task(tmp_path, tools=[ECHO])
    played(environment, ["<echo>\n  if x:\n    y\n</echo>", "<answer></answer>"])
    assert environment._tools["echo"].asked == [{"text": "if x:\n  y"}]


def test_calls_of_the_chat_template_are_answered_by_tool_messages(tmp_path):
    environment = task(tmp_path, tools=[ECHO, CALCULATOR], calls="template", max_calls=3)
    calls = [
        Call(name="calculator", arguments={"expression": "6/4"}, id="c1"),
        Call(name="echo", arguments={"text": "a"}),
        Call(name="nothing", arguments={}, id="c3"),
        Call(name="echo", arguments={"text": "b"}, id="c4"),
    ]
    requests, over = played(environment, [Said(agent="agent", text="t", calls=calls), Said(agent="agent", text="1.5")])
    assert [tool.name for tool in requests[0].tools] == ["echo", "calculator"] and requests[0].stop == ()
    assert requests[1].messages == [
        {"role": "tool", "name": "calculator", "content": "1.5", "tool_call_id": "c1"},
        {"role": "tool", "name": "echo", "content": "[a]"},
        {
            "role": "tool", "name": "nothing", "tool_call_id": "c3",
            "content": "error: there is no tool 'nothing', only echo, calculator",
        },
        {"role": "tool", "name": "echo", "content": "error: no more than 3 calls are answered", "tool_call_id": "c4"},
    ]  # fmt: skip
    assert over.answers == {"agent": "t\n1.5"} and over.rewards == {"agent": {"tool_calls": 3.0}}


def test_a_call_that_cannot_be_read_is_a_models_mistake(tmp_path):
    said = [Said(agent="agent", text="t", calls=[Call(name="echo", arguments=None)]), Said(agent="agent", text="u")]
    requests, _ = played(task(tmp_path, tools=[ECHO], calls="template"), said)
    assert "cannot be read" in contents(requests)[1]


def test_a_tool_that_breaks_is_asked_once_more_and_then_ends_the_episode(tmp_path):
    call, answer = "<flaky>a</flaky>", "<answer>b</answer>"
    requests, over = played(task(tmp_path, tools=[FLAKY]), [call, answer])
    assert contents(requests)[1] == "\n<result>[a]</result>\n" and over.rewards == {"agent": {"tool_calls": 1.0}}
    with pytest.raises(EnvironmentFailure, match="server is away"):
        played(task(tmp_path, tools=[{"target": FLAKY, "args": {"failures": 2}}]), [call, answer])


def test_a_sandbox_that_is_lost_is_tried_twice_in_all(tmp_path, monkeypatch):
    asked = []

    def lost(code, **settings):
        asked.append(code)
        raise SandboxFailure("lost")

    monkeypatch.setattr(sandbox, "run_program", lost)
    with pytest.raises(EnvironmentFailure, match="the tool python: lost"):
        played(task(tmp_path, tools=[PYTHON]), ["<python>1 + 1</python>"])
    assert asked == ["1 + 1"] * 2


def test_a_task_with_messages_is_put_as_its_conversation(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 * 3?"}]
    requests, _ = played(task(tmp_path), ["<answer>6</answer>"], messages=messages)
    assert requests[0].messages == messages


def test_the_form_of_search_r1(tmp_path):
    environment = task(
        tmp_path, tools=[{"target": ECHO, "args": {"name": "search"}}], template="search_r1",
        result="\n\n<information>{result}</information>\n\n",
    )  # fmt: skip
    requests, _ = played(environment, ["<search> Beijing </search>", "<answer> x </answer>"], question="Where?")
    assert contents(requests)[1] == "\n\n<information>[Beijing]</information>\n\n"
    assert contents(requests)[0].endswith("Question: Where?\n")
    assert all(f"<{tag}> and </{tag}>" in contents(requests)[0] for tag in ("think", "search", "information", "answer"))


def test_the_packaged_prompt_of_the_calculator_names_its_tags():
    text = fill(read_template("calculator_tags"), question="1 + 1?")
    assert all(f"<{tag}> and </{tag}>" in text for tag in ("calculator", "result", "answer")) and "1 + 1?" in text


@pytest.mark.parametrize(
    "args, says",
    [
        ({"max_calls": 0}, "max_calls = 0"),
        ({"template": "no_such_prompt"}, "args.template: no prompt template 'no_such_prompt'"),
        ({"template": "gymnasium"}, "needs {question}"),
        ({"result": "<result></result>"}, "needs {result}"),
        ({"tools": []}, "are named nothing"),
        ({"tools": [{"target": ECHO}, {"target": ECHO}]}, "echo, echo"),
        ({"answer": "echo", "tools": [{"target": ECHO}]}, "other than args.answer"),
        ({"tools": [{"target": "task_tools:Pair"}]}, "'pair' requires text, times"),
        ({"tools": [{"target": "megatron_rl.engines.protocol:Sampling", "args": {"max_tokens": 3}}]}, "is no tool"),
        ({"tools": [{"target": CALCULATOR, "args": {"digits": 3}}]}, "digits: unknown key"),
        ({"calls": "xml"}, "calls = "),
    ],
)
def test_a_tool_task_that_cannot_be_is_refused(tmp_path, args, says):
    (tmp_path / "ask.txt").write_text("{question}")
    settings = {"tools": [{"target": CALCULATOR}], "template": str(tmp_path / "ask.txt"), **args}
    with pytest.raises(ConfigError) as caught:
        plugins.build(Use(target=TOOL_TASK, args=settings))
    assert says in str(caught.value)


def test_a_tool_with_two_arguments_is_called_by_the_template(tmp_path):
    assert task(tmp_path, tools=["task_tools:Pair"], calls="template")
