"""The embedded engine against transformers, and what must not change with batching, ranks or a broken weight stream."""

import json
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA31_ROPE, make_model
from toys import characters
from transformers import AutoModelForCausalLM

from megatron_rl.engines.batched_session import Row
from megatron_rl.engines.embedded import embedded_engine as embedded
from megatron_rl.engines.embedded.embedded_engine import EmbeddedEngine
from megatron_rl.engines.protocol import EngineError, Sampling, complete
from megatron_rl.models.registry import families
from megatron_rl.types import Stop
from megatron_rl.weights import hf_model

MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama3.1": ("llama", LLAMA31_ROPE),
    "mistral": ("mistral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3_moe-as-routed": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-renormalised": ("qwen2_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "gemma3": ("gemma3_text", {"num_key_value_heads": 1}),
    "gemma3-untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-greedy": ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "greedy", "first_k_dense_replace": 0}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 3}),
    "olmo2": ("olmo2", {}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4}),
    "olmo2-every-head-its-key": ("olmo2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}
GREEDY = Sampling(max_tokens=40, temperature=0.0)
ONCE = Sampling(max_tokens=24)


def prompts_of(lengths, vocab=96, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


PROMPTS = prompts_of([3, 50, 1, 17, 17, 8, 30, 5])


def loaded(directory, **settings):
    engine = EmbeddedEngine(directory, **settings)
    engine.load_pretrained()
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Qwen2 model that ends a sequence at token 7, 3 % of the time."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", eos_token_id=7)


@pytest.fixture(scope="module")
def engine(directory):
    return loaded(directory, max_batch=4)


def tokens_of(completions):
    return [c.tokens.tolist() for row in completions for c in row]


def scores_of(engine):
    return [scores.tolist() for scores in engine.score(PROMPTS)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_logprobs_equal_transformers(tmp_path, name):
    family, overrides = MODELS[name]
    make_model(tmp_path, family, **overrides)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = loaded(tmp_path, max_batch=3)
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    wanted = reference.generate(padded, attention_mask=seen, do_sample=False, max_new_tokens=GREEDY.max_tokens)[
        :, width:
    ].tolist()
    for prompt, tokens, (completion,) in zip(PROMPTS, wanted, complete(engine, PROMPTS, GREEDY), strict=True):
        assert completion.tokens.tolist() == tokens
        assert completion.stop is Stop.LENGTH
        assert_model_logprobs(reference, engine, prompt, completion)
    for prompt, (completion,) in zip(PROMPTS, complete(engine, PROMPTS, ONCE), strict=True):
        assert_model_logprobs(reference, engine, prompt, completion)
        assert np.array_equal(completion.logprobs, completion.model_logprobs)


def test_every_family_is_compared_with_transformers():
    assert families().keys() == {family for family, _ in MODELS.values()}


def assert_model_logprobs(reference, engine, prompt, completion):
    sequence = [*prompt, *completion.tokens.tolist()]
    with torch.no_grad():
        logprobs = reference(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
    wanted = logprobs.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    assert completion.model_logprobs == pytest.approx(wanted[len(prompt) - 1 :].numpy(), abs=2e-5)
    assert engine.score([sequence])[0] == pytest.approx(np.append(0.0, wanted.numpy()), abs=2e-5)


def test_bfloat16_stays_near_float32(directory, engine):
    half = loaded(directory, dtype=torch.bfloat16)
    exact, rounded = (e.score([PROMPTS[1]])[0] for e in (engine, half))
    assert 0 < np.abs(exact - rounded).max() < 0.1
    assert len(complete(half, PROMPTS, ONCE)) == len(PROMPTS)


def test_result_does_not_depend_on_max_batch_or_company(directory):
    sampling = Sampling(max_tokens=60, n=3, seed=4)
    one, few, all_at_once = (complete(loaded(directory, max_batch=n), PROMPTS, sampling) for n in (1, 5, 256))
    assert tokens_of(one) == tokens_of(few) == tokens_of(all_at_once)
    lengths = [len(t) for t in tokens_of(one)]
    assert len(set(lengths)) > 5 and max(lengths) == 60, (
        "rows must leave at different times for this test to mean something"
    )
    for a, b in zip(one, all_at_once, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.stop is y.stop
            assert x.logprobs == pytest.approx(y.logprobs, abs=2e-5)
    rows = [Row(np.array(PROMPTS[i]), i, j, sampling) for i, j in ((6, 2), (0, 0), (6, 1))]  # a rank's share
    shared = loaded(directory, max_batch=2).generate_rows(rows)
    assert tokens_of([shared]) == tokens_of([[one[6][2], one[0][0], one[6][1]]])


def test_seeds_samples_and_prompt_places_draw_differently(engine):
    prompts = [PROMPTS[0]] * 2
    first = tokens_of(complete(engine, prompts, Sampling(max_tokens=20, n=2, seed=0)))
    again = tokens_of(complete(engine, prompts, Sampling(max_tokens=20, n=2, seed=0)))
    other = tokens_of(complete(engine, prompts, Sampling(max_tokens=20, n=2, seed=1)))
    assert first == again
    assert len({tuple(t) for t in first + other}) == 8


def test_first_tokens_follow_the_model(engine, directory):
    """Chi-square of the engine's own first draws against transformers' softmax."""
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt, count = PROMPTS[3], 4000
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1] / 0.5
    drawn = complete(loaded(directory), [prompt], Sampling(max_tokens=1, n=count, temperature=0.5))[0]
    expected = logits.softmax(-1).double() * count
    likely = expected > 5
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=96).double()
    merged = (
        torch.cat([expected[likely], expected[~likely].sum()[None]]),
        torch.cat([counts[likely], counts[~likely].sum()[None]]),
    )
    freedom = int(likely.sum())
    assert ((merged[1] - merged[0]) ** 2 / merged[0]).sum() < freedom + 4 * (2 * freedom) ** 0.5
    wanted = logits.log_softmax(-1)[[int(c.tokens[0]) for c in drawn]]
    torch.testing.assert_close(torch.tensor([c.logprobs[0] for c in drawn]), wanted, atol=2e-5, rtol=0)


def test_eos_and_stop_tokens_end_a_row_and_are_kept(engine):
    free = complete(engine, PROMPTS, Sampling(max_tokens=60))
    ended = [row[0] for row in free if row[0].stop is Stop.EOS]
    assert ended and all(c.tokens.tolist().index(7) == len(c.tokens) - 1 for c in ended)
    assert all(7 not in row[0].tokens and len(row[0].tokens) == 60 for row in free if row[0].stop is Stop.LENGTH)
    place = max(range(len(free)), key=lambda i: len(free[i][0].tokens))
    longest = free[place][0].tokens.tolist()
    stop = longest[len(longest) // 2]
    cut = complete(engine, PROMPTS, Sampling(max_tokens=60, stop_tokens=(stop,)))[place][0]
    assert cut.tokens.tolist() == longest[: longest.index(stop) + 1]
    assert cut.stop is Stop.STOP


def test_eos_comes_from_config_generation_config_and_tokenizer(tmp_path):
    make_model(tmp_path, "llama", eos_token_id=[3, 4])
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": 5}))
    rows = complete(loaded(tmp_path, tokenizer=characters()), PROMPTS, Sampling(max_tokens=100, n=8))
    last = {int(c.tokens[-1]) for row in rows for c in row if c.stop is Stop.EOS}
    assert last == {0, 3, 4, 5}  # 0 is the tokenizer's
    assert not any({0, 3, 4, 5} & set(c.tokens[:-1].tolist()) for row in rows for c in row)


def test_stop_strings_end_with_the_token_that_completes_them(directory):
    tokenizer = characters()
    engine = loaded(directory, max_batch=3, tokenizer=tokenizer)
    free = [row[0] for row in complete(engine, PROMPTS, Sampling(max_tokens=80))]
    text = tokenizer.decode(free[1].tokens)
    assert len(text) > 45
    for stop_string in (text[5:8], text[3:43]):  # the second is longer than any fixed window of a few tokens
        stopped = [
            row[0] for row in complete(engine, PROMPTS, Sampling(max_tokens=80, stop_strings=(stop_string, "\n\n\n\n")))
        ]
        end = text.index(stop_string) + len(stop_string)
        assert stopped[1].tokens.tolist() == free[1].tokens[:end].tolist()
        assert stopped[1].stop is Stop.STOP
        assert stopped[0].tokens.tolist() == free[0].tokens.tolist()
    with pytest.raises(ValueError, match="stop_strings .* need a tokenizer: give one"):
        complete(loaded(directory), PROMPTS, Sampling(max_tokens=8, stop_strings=("x",)))


def test_the_context_limit_ends_a_row(tmp_path, caplog):
    make_model(tmp_path, "qwen2", max_position_embeddings=24)
    engine = loaded(tmp_path, max_batch=2)
    prompts = prompts_of([20, 24, 30, 23, 4])
    out = [row[0] for row in complete(engine, prompts, Sampling(max_tokens=10))]
    assert [len(c.tokens) for c in out] == [4, 0, 0, 1, 10]
    assert all(c.stop is Stop.LENGTH for c in out)
    said = f"{tmp_path}: 1 prompt(s) so far filled the model's context, the last one with 24 tokens"
    assert [said in line for line in caplog.messages] == [True], "at the first of the two"
    assert complete(engine, prompts[1:2], GREEDY)[0][0].tokens.size == 0
    assert complete(engine, [], GREEDY) == [] and engine.score([]) == []


def test_load_takes_the_stream_and_sets_the_version(tmp_path, directory, engine):
    other = make_model(tmp_path, "qwen2", seed=1)
    changed = EmbeddedEngine(directory)
    changed.load(hf_model.read_tensors(directory), version=0)
    assert scores_of(changed) == scores_of(engine)
    weights = dict(hf_model.read_tensors(other))
    changed.load(weights.items(), version=3)
    for tensor in weights.values():
        tensor.zero_()  # the trainer goes on changing its own
    assert changed.version == 3
    assert scores_of(changed) == scores_of(loaded(other)) != scores_of(engine)


def test_load_reads_sharded_directories(tmp_path, directory, engine):
    shards = tmp_path / "sharded"
    shards.mkdir()
    (shards / "config.json").write_text((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in files if files[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert scores_of(loaded(shards)) == scores_of(engine)


def test_a_tied_model_takes_a_stream_with_and_without_the_head(tmp_path):
    make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    weights = dict(hf_model.read_tensors(tmp_path))
    weights.pop("lm_head.weight", None)
    without, with_head = EmbeddedEngine(tmp_path), EmbeddedEngine(tmp_path)
    without.load(weights.items(), version=0)
    with_head.load({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}.items(), version=0)
    assert scores_of(without) == scores_of(with_head)


def test_a_bad_stream_changes_nothing(directory):
    engine = loaded(directory)
    before, good = scores_of(engine), {name: 2 * t for name, t in hf_model.read_tensors(directory)}
    down = "model.layers.2.mlp.down_proj.weight"
    bad = {
        f"1 tensors are missing, the first is {down}": {n: t for n, t in good.items() if n != down}.items(),
        "unknown tensor 'model.layers.4.mlp.down_proj.weight'": {
            **good,
            "model.layers.4.mlp.down_proj.weight": good[down],
        }.items(),
        rf"{down} has shape \(128, 64\), the model needs \(64, 128\)": {**good, down: good[down].T}.items(),
        f"{down} came twice": [*good.items(), (down, good[down])],
    }
    for message, stream in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.load(stream, version=1)
        assert engine.version == 0
    assert scores_of(engine) == before


def test_misuse_is_refused_with_the_cure(directory, engine):
    empty = EmbeddedEngine(directory)
    assert empty.version == -1
    for call in (lambda: complete(empty, PROMPTS, ONCE), lambda: empty.score(PROMPTS)):
        with pytest.raises(RuntimeError, match="no whole weights: call load"):
            call()
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        complete(engine, [[1], []], ONCE)
    with pytest.raises(ValueError, match="prompt 0 holds token 96, the model's vocabulary has 96"):
        complete(engine, [[1, 96]], ONCE)
    with pytest.raises(ValueError, match="temperature = -1"):
        complete(engine, [[1]], Sampling(max_tokens=1, temperature=-1.0))
    with pytest.raises(ValueError, match="max_batch = 0"):
        EmbeddedEngine(directory, max_batch=0)


def test_weights_that_are_not_finite_are_reported(directory):
    engine = EmbeddedEngine(directory)
    engine.load(
        ((n, t * torch.nan if n == "model.norm.weight" else t) for n, t in hf_model.read_tensors(directory)), version=0
    )
    with pytest.raises(FloatingPointError, match="not finite"):
        complete(engine, PROMPTS, GREEDY)


def test_rows_of_one_round_have_a_sampling_each(engine):
    """The answer to a key does not depend on the samplings of its neighbours, whether they share its batch or
    not."""
    samplings = [
        Sampling(max_tokens=30, n=2, seed=1),
        Sampling(max_tokens=7, seed=1),
        Sampling(max_tokens=30, seed=9),
        Sampling(max_tokens=30, temperature=0.5, top_k=5),
        GREEDY,
        Sampling(max_tokens=30, stop_tokens=(11, 12, 13)),
    ]
    session = engine.session()
    for key, sampling in enumerate(samplings):
        session.ask(key, PROMPTS[key % 3], sampling)
    together = dict(session.answers())
    for key, sampling in enumerate(samplings):
        alone = engine.session()
        alone.ask(key, PROMPTS[key % 3], sampling)
        [(_, wanted)] = alone.answers()
        assert tokens_of([together[key]]) == tokens_of([wanted]) and len(wanted) == sampling.n
        assert [c.stop for c in together[key]] == [c.stop for c in wanted]
    assert len(together[1][0].tokens) <= 7 < len(together[0][0].tokens)


def test_a_round_takes_all_that_was_asked_and_the_next_what_came_meanwhile(engine, monkeypatch):
    rounds, draw = [], engine.generate_rows
    monkeypatch.setattr(engine, "generate_rows", lambda rows: rounds.append([r.key for r in rows]) or draw(rows))
    session, read = engine.session(), []
    for key in range(3):
        session.ask(key, PROMPTS[key], ONCE)
    for key, [completion] in session.answers():
        read.append(key)
        if key < 3:  # a second turn of the same conversation
            session.ask(10 + key, [*PROMPTS[key], *completion.tokens.tolist(), 3], ONCE, after=key)
    assert rounds == [[0, 1, 2], [10, 11, 12]] and read == [0, 1, 2, 10, 11, 12]
    session.ask(20, PROMPTS[0], ONCE)
    assert [key for key, _ in session.answers()] == [20] and list(session.answers()) == []


def test_a_thread_that_may_ask_is_waited_for(engine):
    """One of two askers fails, which ends its block too."""
    session, seen = engine.session(), []
    inside, go = threading.Barrier(3), threading.Event()

    def asker(key):
        with session.asking():
            inside.wait(30)
            assert go.wait(30)
            if key == 2:
                return
            session.ask(key, PROMPTS[key], ONCE)

    threads = [threading.Thread(target=asker, args=(key,)) for key in (1, 2)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    session.ask(0, PROMPTS[0], ONCE)
    for key, _ in session.answers():
        seen.append(key)
        go.set()
    for thread in threads:
        thread.join()
    assert seen == [0, 1]


def test_a_session_that_is_left_or_closed_forgets_what_was_not_done(engine):
    session = engine.session()
    for key in range(3):
        session.ask(key, PROMPTS[key], ONCE)
    for _ in session.answers():
        session.ask(5, PROMPTS[0], ONCE)
        break
    assert list(session.answers()) == []
    session.ask(6, PROMPTS[0], ONCE)
    for key, _ in session.answers():
        assert key == 6
        session.close()
    with pytest.raises(EngineError, match="was closed: ask in a new one"):
        session.ask(7, PROMPTS[0], ONCE)
    assert list(session.answers()) == []


def test_a_reader_that_waits_is_let_go_by_close(engine):
    session = engine.session()
    with session.asking():
        timer = threading.Timer(0.1, session.close)
        timer.start()
        assert list(session.answers()) == []
        timer.join()


def test_wrong_asks_are_refused_where_they_are_asked(engine):
    session = engine.session()
    session.ask(0, PROMPTS[0], ONCE)
    with pytest.raises(ValueError, match="key 0 was asked before"):
        session.ask(0, PROMPTS[1], ONCE)
    with pytest.raises(ValueError, match="prompt 1 holds token 96"):
        session.ask(1, [96], ONCE)
    with pytest.raises(ValueError, match=r"sampling.top_p = 0"):
        session.ask(2, PROMPTS[0], replace(ONCE, top_p=0.0))
    assert [key for key, _ in session.answers()] == [0]


def test_scores_do_not_depend_on_company_and_parts(directory, engine, monkeypatch):
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = prompts_of([1, 2, 300, 7, 40, 7, 129], seed=3)
    monkeypatch.setattr(embedded, "SCORE_TOKENS", 32)
    monkeypatch.setattr(embedded, "SCORED_TOGETHER", 90)
    for text, scores in zip(texts, engine.score([np.array(text) for text in texts]), strict=True):
        with torch.no_grad():
            every = reference(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        wanted = every.gather(1, torch.tensor(text[1:], dtype=torch.int64)[:, None])[:, 0].numpy()
        assert scores.dtype == np.float32 and scores == pytest.approx(np.append(0.0, wanted), abs=2e-5)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        engine.score([[1], []])


def test_bfloat16_attention_scores_are_not_rounded(directory):
    """Scores of attention were rounded to bfloat16: what was decoded missed what is scored in one pass, which
    trainers compute."""
    engine = loaded(directory, dtype=torch.bfloat16)
    decoder = engine._loaded()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 6, decoder.arch.kv_heads, 200, decoder.arch.head_dim)
    cache = torch.randn(shape, generator=generator).bfloat16()
    q = (3 * torch.randn(6, decoder.arch.heads, decoder.arch.head_dim, generator=generator)).bfloat16()
    bias = torch.zeros(6, 200, dtype=torch.bfloat16)
    bias[:, 150:] = -torch.inf
    keys, values = cache.double().repeat_interleave(decoder.arch.heads // decoder.arch.kv_heads, dim=2)
    weights = torch.einsum("bhd,bhld->bhl", q.double(), keys) * decoder.arch.head_dim**-0.5 + bias.double()[:, None]
    exact = torch.einsum("bhl,bhld->bhd", weights.softmax(-1), values).flatten(1)
    rounded = torch.einsum("bhl,bhld->bhd", weights.bfloat16().double().softmax(-1), values).flatten(1)
    error = (decoder._attend(q, *cache, bias).double() - exact).abs().mean()
    assert error < 0.5 * (rounded - exact).abs().mean(), "a rounded score costs more than a rounded result"
