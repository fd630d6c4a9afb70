"""A tokenizer of single characters, and graders, small enough to follow by hand."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.rewards.grading_pool import Graded
from megatron_rl.types import Outcome

EOS = 0
CHARACTERS = "\n" + "".join(chr(c) for c in range(32, 127))


def characters(alphabet=CHARACTERS):
    """Token 0 ends a text, token i is the i-th character of the alphabet; decoding puts nothing between them."""
    vocabulary = {"<eos>": EOS} | {c: i for i, c in enumerate(alphabet, start=1)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def merging(alphabet, merged):
    """The tokens of `characters(alphabet)`, and a token for each pair of two characters of `merged`, which texts get
    wherever the pair stands."""
    single = {"<eos>": EOS} | {c: i for i, c in enumerate(alphabet, start=1)}
    pairs = [(a, b) for a in merged for b in merged]
    vocabulary = single | {a + b: len(single) + i for i, (a, b) in enumerate(pairs)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def streaming(policy, engine):
    """Makes a role's refit: whole tensors from the policy into the engine."""
    return lambda version: engine.load(policy.weights(), version=version)


def graded(rule):
    """Makes a grader of a rule: (response, payload) -> float, bool, Graded or an Outcome of failure."""

    def one(response, payload):
        grading = rule(response, payload)
        if isinstance(grading, Graded):
            return grading
        return (
            Graded(grading, detail="made to fail")
            if isinstance(grading, Outcome)
            else Graded(Outcome.SCORE, float(grading))
        )

    return lambda responses, payloads: [one(r, p) for r, p in zip(responses, payloads, strict=True)]
