"""Computes how many samples a cycle of a recipe's schedule draws and trains on, and how long the samples are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from megatron_rl.config import files as config_files
from megatron_rl.config.base import refuse, refusing
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import ConfigError, RoleConfig
from megatron_rl.models.shape import Shape, read_shape
from megatron_rl.spec.run_spec import RoleSpec

FILL = 0.5  # default of the mean length of prompts and answers, as a share of the maximum length


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The samples of one role in one iteration. `episode` gives the number of answers in each sample."""

    role: str
    samples: int
    prompt: float  # mean number of tokens of a prompt
    response: float  # mean number of tokens of an answer
    longest: int  # maximum number of tokens of an answer
    per_prompt: float = 1.0  # mean number of samples per prompt
    episode: EpisodeEstimate = field(default_factory=EpisodeEstimate)

    @property
    def written(self) -> float:
        """Returns the mean number of tokens of all answers of a sample."""
        return self.episode.answers * self.response

    @property
    def length(self) -> float:
        """Returns the mean number of tokens of a sample: the prompt, the answers, and the tokens inserted between
        answers."""
        return self.prompt + self.written + (self.episode.answers - 1) * self.episode.told

    def context(self, answer: int) -> float:
        """Returns the mean number of tokens before the answer with index `answer`, counted from 0."""
        return self.prompt + answer * (self.response + self.episode.told)


@dataclass(frozen=True, kw_only=True)
class ScorePass:
    """A forward pass of the score stage over the samples `draw`. The pass uses the model of the role `by` or, if
    `reference` is set, the frozen reference of this model.
    """

    draw: Draw
    by: str
    reference: bool

    def __str__(self) -> str:
        return f"score {self.draw.role} by {'the reference of ' if self.reference else ''}{self.by}"


@dataclass(frozen=True, kw_only=True)
class IterationWork:
    """The samples that one iteration draws, scores and trains on. A cycle (item of the schedule) contains `times` such
    iterations.
    """

    draws: Sequence[Draw]
    scores: Sequence[ScorePass]
    # samples that the iteration trains on, for each trained role; `draws` may hold more samples of these roles
    trained: Sequence[Draw]
    times: int
    name: str = ""  # name in tables; "": the roles that the iteration trains

    @property
    def roles(self) -> list[str]:
        """Returns the roles that the iteration trains."""
        return [draw.role for draw in self.trained]

    @property
    def role(self) -> str:
        """Returns the iteration's name in tables: `name`, or the roles that the iteration trains, joined by +."""
        return self.name or " + ".join(self.roles)


def cycle_work(
    recipe: Any,
    roles: Mapping[str, RoleSpec],
    prompts_per_iteration: int,
    *,
    fills: Mapping[str, float] | None = None,
    episodes: Mapping[str, EpisodeEstimate] | None = None,
    draws: Mapping[tuple[str, str], float] | None = None,
) -> list[IterationWork]:
    """Returns the iterations of a cycle of the schedule, taken from the middle of the run.

    Roles that are trained in the same iteration use one common set of drawn samples.

    `fills`: role -> mean length as a share of max_prompt_tokens and sampling.max_tokens (see `fills_of`). Roles without
    an entry use their setting mean_tokens.
    `episodes`: role -> estimate of its episodes (see `episodes_of`); None: the recipe's estimates.
    `draws`: overrides of the recipe's numbers of samples (see `draws_of`).
    """
    episodes = episodes_of(recipe, roles, ()) if episodes is None else episodes
    parts, schedule = recipe.roles(), recipe.schedule()
    # The middle is counted in iterations, not in cycles, because a long warm-up may consist of many short cycles.
    ends = list(accumulate(len(cycle) for cycle in schedule))
    cycle = schedule[bisect_right(ends, ends[-1] // 2)]
    # leave out critics that share a policy's model, because they add no work
    iterations = [tuple(name for name in trained if not roles[name].shares_as_critic) for trained in cycle]
    work = list[IterationWork]()
    for iteration in dict.fromkeys(iterations):
        drawn, same = Counter[str](), Counter[str]()
        for name in iteration:  # take the largest number of any role, because all roles share one set of samples
            drawn |= Counter(parts[name].drawn or {name: parts[name].samples})
            same |= Counter(parts[name].per_prompt)
        counts = {**drawn, **{to: number for (by, to), number in (draws or {}).items() if by in iteration}}
        role_draws = _draws(roles, prompts_per_iteration, counts, same, fills or {}, episodes)
        trained = [
            replace(draw, samples=max(1, round(draw.samples * parts[draw.role].samples / drawn[draw.role])))
            for draw in role_draws if draw.role in iteration
        ]  # fmt: skip
        scores = recipe.scores_of(iteration)
        # a critic is trained on the samples that it scores
        read = {score.by: score.role for score in scores if score.name == "value"}
        trained += [replace(d, role=name) for name in iteration for d in trained if read.get(name) == d.role != name]
        # no texts are generated for a reward model: it reads the samples of the first trained role
        sizes = {draw.role: draw for draw in [*role_draws, *trained]}
        passes = dict.fromkeys((score.role, score.by, score.name == "reference_logprobs") for score in scores)
        scored = [
            ScorePass(draw=replace(sizes.get(role, trained[0]), role=role), by=by, reference=reference)
            for role, by, reference in passes
        ]
        work.append(IterationWork(draws=role_draws, scores=scored, trained=trained, times=iterations.count(iteration)))
    return work


def fills_of(roles: Collection[str], settings: Sequence[str]) -> dict[str, float]:
    """Returns {role: mean length of prompts and answers as a share of the maximum length}.

    `settings`: texts of the form SHARE, for all roles, or ROLE=SHARE.

    Raises ConfigError for an unknown role, and for a share outside (0, 1].
    """
    fills = _by_name("--fill", "ROLE=SHARE", settings, roles)
    refuse(
        *(
            f"--fill {share:g}: mean lengths as a share of the longest, above 0 and at most 1"
            for share in fills.values()
            if not 0 < share <= 1
        )
    )
    everywhere = fills.pop("", None)
    return ({} if everywhere is None else dict.fromkeys(roles, everywhere)) | fills


def rows_given(sets: Collection[str], settings: Sequence[str]) -> dict[str, float]:
    """Returns {data set: number of its rows}; "" is for all sets. `settings`: texts of the form NUMBER or SET=NUMBER.

    Raises ConfigError for an unknown set, and for a number below 1.
    """
    counts = _by_name("--rows", "SET=NUMBER", settings, sets)
    refuse(*(f"--rows {number:g}: a number of rows, 1 or more" for number in counts.values() if not 1 <= number < 1e12))
    return counts


def _by_name(option: str, form: str, settings: Sequence[str], names: Collection[str]) -> dict[str, float]:
    """Parses texts of the form NAME=NUMBER. Returns {name: number}. A text without NAME= has the name ""."""
    words = [text if "=" in text else f"={text}" for text in settings]
    return {_split(option, form, word, [*names, ""])[0]: _number(option, word.removeprefix("=")) for word in words}


def draws_of(roles: Collection[str], settings: Sequence[str]) -> dict[tuple[str, str], float]:
    """Returns {(iteration, role): mean number of samples of the role per prompt}.

    `settings`: texts of the form ITERATION.ROLE=NUMBER, in which ITERATION is the name of a role that the iteration
    trains.

    Raises ConfigError for an unknown role, and for a number that is not positive.
    """
    draws = dict[tuple[str, str], float]()
    for text in settings:
        [iteration, role, _] = _split("--draws", "ITERATION.ROLE=NUMBER", text, roles)
        draws[iteration, role] = _number("--draws", text)
        if not 0 < draws[iteration, role] < float("inf"):
            raise ConfigError(f"--draws {text}: a mean number of samples for each prompt, above 0")
    return draws


def _split(option: str, form: str, text: str, roles: Collection[str]) -> list[str]:
    """Splits a text of the form A.B=VALUE into A, B and VALUE.

    `form`: the expected form, such as ROLE.name=value. `roles`: the names that are allowed in place of a word in
    capitals before the = of the form. Raises ConfigError if the text has another number of parts than the form, or
    another name in place of such a word.
    """
    names, _, value = text.partition("=")
    parts, kinds = names.split("."), form.partition("=")[0].split(".")
    if (
        not value
        or len(parts) != len(kinds)
        or any(kind.isupper() and part not in roles for part, kind in zip(parts, kinds, strict=True))
    ):
        raise ConfigError(
            f"{option} {text}: it has the form {form}; "
            f"the {'sets' if 'SET' in kinds else 'roles'} are {', '.join(filter(None, roles))}"
        )
    return [*parts, value]


def _number(option: str, text: str) -> float:
    """Returns the number at the end of the text A=NUMBER or NUMBER. Raises ConfigError if it is not a number."""
    value = text.rpartition("=")[2]
    with refusing(lambda error: f"{option} {text}: {value!r} is not a number", ValueError):
        return float(value)


def episodes_of(recipe: Any, roles: Mapping[str, RoleConfig], settings: Sequence[str]) -> dict[str, EpisodeEstimate]:
    """Returns {role: estimate of its episodes}: the recipe's estimates, overridden by `settings`.

    `settings`: texts of the form ROLE.name=value, in which `name` is a field of the estimate.

    Raises ConfigError for an unknown role or name, and for an invalid value.
    """
    settings_of_role: dict[str, list[str]] = {name: [] for name in roles}
    for text in settings:
        [role, name, value] = _split("--episode", "ROLE.name=value", text, roles)
        settings_of_role[role].append(f"{name}={value}")
    parts, estimates = recipe.roles(), dict[str, EpisodeEstimate]()
    for name, role_settings in settings_of_role.items():
        defaults = asdict(parts[name].episode) if name in parts else {}
        try:
            estimates[name] = config_files.load(EpisodeEstimate, [], role_settings, trees=[("the recipe", defaults)])
        except ConfigError as error:
            raise ConfigError(f"--episode of {name}: {error}") from error
    return estimates


def longest_context(role: RoleConfig, episode: EpisodeEstimate) -> int:
    """Returns the maximum number of tokens of one sample of a role.

    The number is the sum of the longest prompt, all answers at maximum length, and the mean number of tokens between
    answers. In a bounded episode, the number is the maximum prompt length plus one answer.
    """
    if episode.bounded:
        return role.max_prompt_tokens + role.sampling.max_tokens
    return role.max_prompt_tokens + episode.answers * role.sampling.max_tokens + (episode.answers - 1) * episode.told


def _draws(
    roles: Mapping[str, RoleConfig],
    prompts_per_iteration: int,
    drawn: Mapping[str, float],
    alike: Mapping[str, float],
    fills: Mapping[str, float],
    episodes: Mapping[str, EpisodeEstimate],
) -> list[Draw]:
    draws = list[Draw]()
    for name, samples_per_prompt in drawn.items():
        role, episode = roles[name], episodes[name]
        samples = max(1, round(prompts_per_iteration * samples_per_prompt))
        prompt, response, longest = _lengths(role, episode, fills.get(name))
        draws.append(
            Draw(
                role=name, samples=samples, prompt=prompt, response=response, longest=longest, episode=episode,
                per_prompt=max(1.0, min(samples_per_prompt, alike.get(name, 1))),
            )
        )  # fmt: skip
    return draws


def _lengths(role: RoleConfig, episode: EpisodeEstimate, fill: float | None) -> tuple[float, float, int]:
    """Returns (mean tokens of a prompt, mean tokens of an answer, maximum tokens of an answer).

    `fill`: mean length as a share of the maximum length. If None, the role's mean_tokens are used.

    In a bounded episode, the prompt, the earlier answers and the tokens between answers share the number of tokens that
    the prompt has in other episodes. If necessary, answers are assumed to be shorter than in other episodes, so that at
    least a part 1 / (number of answers) of these tokens is left to the prompt. The maximum is the length of each answer
    in the longest sample, if all answers of this sample are equally long.
    """
    mean_tokens, share, longest = role.mean_tokens, FILL if fill is None else fill, role.sampling.max_tokens
    preceding, response = share * role.max_prompt_tokens, share * longest
    if fill is None:
        preceding = min(mean_tokens.prompt or preceding, role.max_prompt_tokens)
        response = min(mean_tokens.answer or response, longest)
    if not episode.bounded or episode.answers == 1:
        return preceding, response, longest
    later = episode.answers - 1
    response = min(response, max(1.0, preceding / episode.answers - episode.told))
    prompt = max(1.0, preceding - later * (response + episode.told))
    room = longest_context(role, episode) - prompt - later * episode.told
    return prompt, response, min(longest, max(1, int(room / episode.answers)))


def models_of(roles: Mapping[str, RoleConfig], settings: Sequence[str]) -> dict[str, Shape]:
    """Returns the shape of every role's model.

    `settings`: texts of the form ROLE=SOURCE. For such a role, the shape is read from SOURCE instead of from the role's
    model path.

    Raises ConfigError for an invalid format, and for a model whose shape cannot be resolved.
    """
    sources = {name: role.model.path for name, role in roles.items()}
    sources |= dict(_split("--shape", "ROLE=SOURCE", word, roles) for word in settings)
    shapes = {name: read_shape(source) for name, source in sources.items()}
    return {name: replace(shape, sizes=shape.sizes.with_head(roles[name].head)) for name, shape in shapes.items()}


def guess_notes(models: Mapping[str, Shape]) -> list[str]:
    """Returns one note for every role whose model sizes are guessed."""
    return [
        f"{name}: sizes are those of {shape.name}, by the words of its path; if it is another model: --shape {name}=..."
        for name, shape in models.items()
        if shape.guessed
    ]
