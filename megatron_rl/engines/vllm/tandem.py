"""Runs the two models of Tandem RL inside one vLLM server, which pages the caches of both models with one block table.
vLLM loads this module as a plug-in, without a patch.

`TandemForCausalLM` runs the senior (trained) and the junior (frozen) model on the same tokens. `Authors`, a logits
processor, tracks for every request which model generates the next token, and replaces the senior's logits by the
junior's when it is the junior's turn. Temperature, truncation, sampling and log-probs are then computed by vLLM. The
junior's weights never change; a refit sends only the senior's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from vllm import (  # pyright resolves `vllm` to the folder of this file instead of the library.
    ModelRegistry,  # pyright: ignore[reportAttributeAccessIssue]
    SamplingParams,  # pyright: ignore[reportAttributeAccessIssue]
)
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from megatron_rl.algorithms.tandem_authors import Pen, Rule, boundaries
from megatron_rl.engines.vllm.names import ARCHITECTURE, TANDEM
from megatron_rl.texts.text import load_tokenizer
from megatron_rl.weights import hf_model

# name under which the model is stored in vLLM's forward context, where the logits processor finds it
PLACE = "megatron_rl.tandem"


def register() -> None:
    """Registers the Tandem RL model class with vLLM, which calls this plug-in entry point in each of its processes."""
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:TandemForCausalLM")


class TandemForCausalLM(nn.Module):
    """A vLLM model for Tandem RL that runs two models, the trained senior and the frozen junior. `forward` returns the
    concatenated hidden states of both models, which `compute_logits` splits.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.additional_config[TANDEM]
        own, other = vllm_config.model_config.hf_config, AutoConfig.from_pretrained(settings["junior"])
        if own.vocab_size != other.vocab_size:
            raise ValueError(
                f"the senior has {own.vocab_size} tokens, the junior {other.vocab_size}: a tandem needs one vocabulary"
            )
        context = vllm_config.model_config.max_model_len
        if other.max_position_embeddings < context:
            raise ValueError(
                f"the junior reads {other.max_position_embeddings} tokens, the server {context}: "
                "lower engine.max_model_len"
            )
        self._junior_directory = settings["junior"]
        self._widths = [own.hidden_size, other.hidden_size]
        # Separate prefixes: vLLM identifies attention layers by name, and each layer needs a separate KV cache.
        self.senior = init_vllm_registered_model(
            vllm_config, prefix=maybe_prefix(prefix, "senior"), hf_config=own, architectures=settings["architectures"]
        )
        self.junior = init_vllm_registered_model(vllm_config, prefix=maybe_prefix(prefix, "junior"), hf_config=other)
        self.junior_logits: Tensor | None = None  # [rows, V], set by the last `compute_logits`
        vllm_config.compilation_config.static_forward_context[PLACE] = self

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.senior.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Runs the senior and the junior model on [N] tokens. Returns their hidden states [N, h_senior + h_junior]."""
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("a tandem reads token ids: prompts of embeddings have no junior")
        return torch.cat([self.senior(input_ids, positions), self.junior(input_ids, positions)], dim=-1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Returns the senior's logits [rows, V]. Stores the junior's logits in `junior_logits` for the logits
        processor.
        """
        senior, junior = hidden_states.split(self._widths, dim=-1)
        self.junior_logits = self.junior.compute_logits(junior.contiguous())
        return self.senior.compute_logits(senior.contiguous())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the weights of both models. `weights`: the senior's weights. The junior's weights are read from the
        junior's model directory.
        """
        loaded = {f"senior.{name}" for name in self.senior.load_weights(weights)}
        return loaded | {
            f"junior.{name}" for name in self.junior.load_weights(hf_model.read_tensors(self._junior_directory))
        }


class Text:
    """The state of one Tandem RL request: which model (senior or junior) generates the next token, given the tokens
    generated so far.
    """

    def __init__(self, pen: Pen, output: list[int]) -> None:
        """`output`: the list of generated tokens, which vLLM extends in place."""
        self._pen, self._output = pen, output
        self.authors: list[bool] = []  # [tokens so far], True for the senior

    def senior_is_next(self) -> bool:
        """Returns whether the senior generates the next token. Raises RuntimeError if vLLM has not reported a sampled
        token yet, because the author of the next token depends on the sampled tokens.
        """
        for token in self._output[len(self.authors) :]:
            if token < 0:
                raise RuntimeError("vLLM has not told a token that was chosen: start it with --no-async-scheduling")
            self.authors.append(self._pen.write(token))
        return self._pen.senior


class Authors(LogitsProcessor):
    """A logits processor for Tandem RL. In rows where the junior generates the next token, the processor replaces the
    logits by the junior's logits. In requests without `extra_args["tandem"]`, the senior generates all tokens.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        settings = (sampling_params.extra_args or {}).get(TANDEM)
        if settings is not None:
            rule_from(settings)
            if sampling_params.seed is None:
                raise ValueError("a tandem request needs a seed: its authors are replayed from it")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._places = vllm_config.compilation_config.static_forward_context
        self._settings: Mapping[str, Any] = vllm_config.additional_config[TANDEM]
        tokenizer = functools.partial(load_tokenizer, self._settings["tokenizer"])
        self.boundaries = functools.cache(lambda rule: boundaries(tokenizer(), rule))  # tokens by rule
        self.texts: dict[int, Text] = {}  # requests, by row of vLLM's batch
        self.keep = False  # whether the authors of requests that begin now are recorded in `kept`
        # {seed of a request: authors of all tokens of the completion except the last token}
        self.kept: dict[int, list[bool]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.texts, batch_update, self._begin)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns the logits [rows, V]: the junior's logits in rows where the junior generates the next token, the
        senior's logits in the other rows.
        """
        others = [row for row, text in self.texts.items() if not text.senior_is_next()]
        if not others:
            return logits
        model = self._places[PLACE]
        if model.junior_logits is None or model.junior_logits.shape != logits.shape:
            raise RuntimeError(
                f"no logits of the junior for rows of shape {tuple(logits.shape)}: "
                "speculative decoding is not for tandems"
            )
        index = torch.tensor(others, device=logits.device)
        logits[index] = model.junior_logits[index].to(logits.dtype)
        return logits

    def _begin(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Text | None:
        settings = (params.extra_args or {}).get(TANDEM)
        if settings is None:
            return None
        rule, key, written = rule_from(settings), settings.get("seed", params.seed), settings.get("written", 0)
        before = prompt or []
        text = Text(Pen(rule, self.boundaries(rule), key, before[len(before) - written :]), output)
        if self.keep:
            self.kept[key] = text.authors
        return text


def rule_from(settings: Mapping[str, Any]) -> Rule:
    """Returns the rule that determines which model generates each token of a request. Raises ValueError for invalid
    settings.
    """
    try:
        return Rule(**settings["rule"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"extra_args.{TANDEM} = {dict(settings)}: {error}") from error
