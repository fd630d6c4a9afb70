"""Answers without a box: right ones in the forms that models write, and wrong ones that must not count."""

from __future__ import annotations

import pytest

from megatron_rl.rewards.math_answer import grade

# Right responses to the known answer 42. All but six of the forms with a tag, a bracket, a quote or a colon were wrong.
RIGHT = [
    "<answer>42</answer>", "<answer> 42 </answer>", "<answer>\n42\n</answer>", "<answer>42.</answer>", "<answer>42",
    "<answer>$42$</answer>", "<answer>x = 42</answer>", "<answer>**42**</answer>", "<answer>42 apples</answer>",
    "<answer>41</answer>, no: <answer>42</answer>", r"<answer>\(42\)</answer>", "<answer>`42`</answer>",
    "<think>7 and 8</think>\n<answer>42</answer>", "<answer>The answer is 42.</answer>",
    "<answer>Answer: 42</answer>", "<answer>We get 6 times 7, which is 42.</answer>", "<answer>\n$$42$$\n</answer>",
    "<answer>(42)</answer>", "The answer is 42.", "The answer is: 42", "Answer: 42", "answer:42", "**Answer:** 42",
    "Answer: **42**", "**Final Answer**: $42$", "The final answer is $42$. I hope it is correct.",
    "The answer is `42`.", 'The answer is "42".', "The answer is (42).", "The answer is\n\n42",
    "Answer:\n$$\nx = 42\n$$", "The answer is 42 cm.", "The answer to this question is 42 apples.",
    "The answer is 40 + 2 = 42.", "The answer should be 42, as 6 * 7 = 42.", "Answer: 42\nI checked it 3 times.",
    "The answer is 42. This answer is right.", "Answer: 41\nWait. Answer: 42", "`42`", "(42)", "[42]", "{42}", '"42"',
    "'42'", "“42”", "#### 42", "####42", "### Step 1: add 9\nSo 42", "$42$", r"\(42\)", r"\[42\]", "$$\n42\n$$",
    "x = 42", "x=42", "x:42", "result=42", "so 42 (forty-two)", "42", "42.0", "- **42**", "* 42",
    "We need $x$. Here $x = 42$.", "She has 7 apples, so 42 in total.", "It is not 41 but 42.", "It is 42, not 41.",
    "6 times 7 is 42", "The value is $\\frac{84}{2}$", "They pay \\$42.", "They pay $42.", "4.2e1",
    "I think that 41 is wrong. It must be 42.", "From $a = 3$ and $b = 39$ it follows that $a + b = 42$.",
]  # fmt: skip
# Wrong responses to the known answer 42.
WRONG = [
    "<answer>41</answer>", "<answer></answer>", "<answer> </answer> 42", "42 <answer>41</answer>",
    "<answer>?</answer>", "<answer>42</answer> or rather <answer>41</answer>", "<answer>41 or 42</answer>",
    "<answer>42, 43</answer>", "<answer>42 (or 43)</answer>", "<answer>not 42</answer>", "<answer>42x</answer>",
    "<answer>(1, 42)</answer>", "<answer>420</answer>", "<answer>-42</answer>", "<answer>4 2</answer>",
    "<answer>42%%</answer>", "<answer>42_5</answer>", "<answer>42 43</answer>", "<answer>42/43</answer>",
    "<answer>42-43</answer>", "<answer>42:43</answer>", "<answer>42!</answer>", "<answer>42^2</answer>",
    "<answer>x > 42</answer>", "<answer>0.42</answer>", "<answer>1,042</answer>", "<answer>42,000</answer>",
    "<answer>42e3</answer>", "<answer>42i</answer>", "<answer>The answer is not 42.</answer>",
    "<answer>The answer is 41 or 42.</answer>", "<answer>v1.42</answer>", "<answer>It is neither 41 nor 42.</answer>",
    "<answer>We do not know if it is 42 or 43.</answer>", r"<answer>42</answer> \boxed{41}",
    r"\boxed{41} <answer>42</answer>", "<answer>42 million</answer>", "The answer is 41.", "The answer is 41 or 42.",
    "The answer is 42 or 41.", "The answer is either 42 or 43.", "The answer is 42, 43.", "The answer is 42 and 43.",
    "The answer is 42; 43", "The answer is not 42.", "The answer isn't 42.", "The answer is (1, 42).",
    "The answer is (42, 1).", "The answer is [0, 42).", "{1, 42}", "The answer is 42x.", "The answer is x42.",
    "The answer is 42_8.", "The answer is 4 2.", "The answer is -42.", "The answer is 1/42.", "The answer is 42/5.",
    "The answer is 42.5.", "The answer is .42.", "The answer is 42^2.", "The answer is 42!", "The answer is x^42.",
    "The answer is 42 + x.", "The answer is $42 + x$.", "The answer is $x$.", "The answer is greater than 42.",
    "The answer is 42 million.", "The answer is 42,000.", "The answer is 142.", "Answer: 42\nAnswer: 41",
    "The answer is 42. Wait, the answer is 41.", "42\n\nAnswer: 41", "#### 42\n#### 41",
    "With n = 42, the answer is x^2 + 1.", "With n = 42, the answer is $n$.",
    "I thought it was 42, but that is wrong.", "42 is wrong.", "42 is incorrect, it is 41.", "It is more than 42",
    "42.41", "1.2.42", "42a", "a42", "42, 41", "41, 42", "42 or 41", "42/41", "42-1", "41\n42 is not the answer.",
    "x = 42, y = 43", "x_42", "42_7", "$42_7$", "4,2", "42:30", "There is no answer", "forty-two is 41", "", "$",
    "####", "Answer:", "<answer>", "</answer>42<answer>", "$-42$", "$x \\ne 42$", "$x > 42$", "$(42, 42)$", "$42x$",
    "$\\{42, 43\\}$", "42\\pi", "42\\sqrt{2}", "42√2", "42π", "√42", "42!",
]  # fmt: skip
# The known answer, and a right response without a box.
EXACT = [
    (r"1 - \frac{1}{e}", "$1 - \\frac1e$"), (r"1 - \frac1e", r"The answer is $1-1/e$."), (r"\frac{1}{2}", "1/2"),
    (r"1-\frac{1}{e}", r"The answer is 1 - \frac1e."), (r"\frac{1}{2}", r"The answer is \frac{1}{2}."),
    (r"2\sqrt{3}", r"It is 2\sqrt{3}."), (r"2\sqrt{3}", "It is 2√3."), (r"\frac{3}{4}", "<answer>3/4</answer>"),
    (r"\frac{\pi}{4}", "The answer is π/4."), ("x^2+1", "The answer is x^2 + 1."),
    ("x^2+1", "<answer>1 + x²</answer>"), ("(1,2)", "The answer is (1, 2)."), ("[0,1)", "<answer>[0, 1)</answer>"),
    (r"\{1,2\}", "The answer is {2, 1}."), ("3,4", "The answer is 3 or 4."), ("3,4", "The answers are 3 and 4."),
    ("1,2,3", "<answer>3, 2 and 1</answer>"), ("1234", "The answer is 1,234."), ("1234.5", "It costs $1,234.50."),
    ("0.5", "The share is 50%."), ("-7", "It is -7."), (r"50\%", "50 percent"), ("320000", "It is 3.2 × 10^5."),
    ("320000", "3.2e5"), ("1500000", "1.5 million"), (r"\frac{9}{4}", "It is 2 1/4."), ("0.5", "½"),
    (r"\text{Evelyn}", "<answer>Evelyn</answer>"), ("yes", "Answer: yes"), (r"15\text{ cm}", "It is 15 cm."),
    (r"5\text{ hours}", "It takes 5 hours."), ("60", "The angle is 60°."), ("3:2", "The ratio is 3:2."),
    (r"x \le 5", "<answer>x ≤ 5</answer>"), ("52_9", "The answer is 52_9."), ("10^6", "10^6"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"<answer>\begin{pmatrix} 1 \\ 2 \end{pmatrix}</answer>"),
    (r"\frac{3}{4}", "So\n\\[\nx = \\frac{3}{4}\n\\]"), ("C", "The answer is C."), ("C", "<answer>(C)</answer>"),
]  # fmt: skip
# The known answer, and a wrong response without a box.
OTHER = [
    (r"1 - \frac{1}{e}", "$1 + \\frac1e$"), (r"1 - \frac{1}{e}", "1"), (r"\frac{1}{2}", "2/1"), ("2", "1/2"),
    ("1", "1/2"), (r"2\sqrt{3}", "2 and 3"), ("3", r"It is 2\sqrt{3}."), ("2", r"2\sqrt{3}"),
    ("(1,2)", "The answer is (2, 1)."), ("2", "The point is (1, 2)."), ("1", "The point is (1, 2)."),
    ("[0,1)", "<answer>(0, 1)</answer>"), ("5", "5x"), (r"5\text{ hours}", "It takes 5 minutes."),
    (r"15\text{ cm}", "<answer>15 m</answer>"), ("52_9", "The answer is 52_8."), ("3,4", "The answer is 4."),
    ("4", "The answers are 3 and 4."), ("1234", "1,235"), ("234", "1,234"), ("1", "1,234"),
    (r"\text{Evelyn}", "<answer>Carla</answer>"), ("yes", "Answer: no"), ("0.5", "The share is 5%."), ("10", "10^6"),
    ("6", "10^6"), (r"x \le 5", "<answer>x ≥ 5</answer>"), ("5", "<answer>x ≤ 5</answer>"),
    ("3", "The ratio is 3:2."), ("7", "It is -7."), ("-7", "It is 7."), ("1.5", "1.5 million"), ("2", "2 1/4"),
    ("C", "The answer is B, not C."), (r"\frac{1}{4}", "2 1/4"), ("3.2", "3.2e5"), ("9", "From 3 and 9, we get 12."),
    ("C", "<answer>A or C</answer>"),
]  # fmt: skip


def test_plain_answer_cases_right_forms_count():
    assert not [response for response in RIGHT if grade(response, {"answer": "42"}) != 1.0]


def test_plain_answer_cases_wrong_answers_do_not_count():
    assert not [response for response in WRONG if grade(response, {"answer": "42"}) != 0.0]


@pytest.mark.parametrize(("pairs", "score"), [(EXACT, 1.0), (OTHER, 0.0)])
def test_plain_answer_cases_of_other_known_answers(pairs, score):
    assert not [(gold, response) for gold, response in pairs if grade(response, {"answer": gold}) != score]
