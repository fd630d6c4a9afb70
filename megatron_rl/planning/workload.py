"""Computes how many samples a cycle of a recipe's schedule draws and trains on, and how long the samples are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate

from megatron_rl.config import files as config_files
from megatron_rl.config.episodes import EpisodeEstimate
from megatron_rl.config.schema import ConfigError, RoleConfig
from megatron_rl.models.shape import Shape, read_shape
from megatron_rl.spec.run_spec import RunSpec

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
class IterationWork:
    """The samples that one iteration draws and trains on. A cycle (item of the schedule) contains `times` such
    iterations.
    """

    draws: Sequence[Draw]
    # samples that the iteration trains on, for each trained role; `draws` may hold more samples of these roles
    trained: Sequence[Draw]
    times: int

    @property
    def roles(self) -> list[str]:
        """Returns the roles that the iteration trains."""
        return [draw.role for draw in self.trained]

    @property
    def role(self) -> str:
        """Returns the iteration's name in tables: the roles that the iteration trains, joined by +."""
        return " + ".join(self.roles)


def cycle_work(
    spec: RunSpec,
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
    episodes = episodes_of(spec, ()) if episodes is None else episodes
    iterations, parts = [tuple(roles) for roles in _middle(spec.recipe.schedule())], spec.recipe.roles()
    drawn = {name: part.drawn or {name: part.samples} for name, part in parts.items()}
    alike = {name: part.per_prompt for name, part in parts.items()}
    out = list[IterationWork]()
    for roles in dict.fromkeys(iterations):
        said, same = (_greatest([counts[name] for name in roles]) for counts in (drawn, alike))
        own = said | {to: number for (iteration, to), number in (draws or {}).items() if iteration in roles}
        found = _draws(spec, own, same, fills or {}, episodes)
        trained = [
            replace(one, samples=max(1, round(one.samples * parts[one.role].samples / said[one.role])))
            for one in found if one.role in roles
        ]  # fmt: skip
        out.append(IterationWork(draws=found, trained=trained, times=iterations.count(roles)))
    return out


def fills_of(roles: Collection[str], settings: Sequence[str]) -> dict[str, float]:
    """Returns {role: mean length of prompts and answers as a share of the maximum length}.

    `settings`: texts of the form SHARE, for all roles, or ROLE=SHARE.

    Raises ConfigError for an unknown role, and for a share outside (0, 1].
    """
    fills: dict[str, float] = {}
    for text in sorted(settings, key=lambda text: "=" in text):
        role, _, value = text.rpartition("=")
        share = _number(value, f"--fill {text}")
        if not 0 < share <= 1:
            raise ConfigError(f"--fill {text}: mean lengths as a share of the longest, above 0 and at most 1")
        if role and role not in roles:
            raise ConfigError(f"--fill {text}: it has the form ROLE=SHARE; the roles are {', '.join(roles)}")
        fills |= {role: share} if role else dict.fromkeys(roles, share)
    return fills


def draws_of(roles: Collection[str], settings: Sequence[str]) -> dict[tuple[str, str], float]:
    """Returns {(iteration, role): mean number of samples of the role per prompt}.

    `settings`: texts of the form ITERATION.ROLE=NUMBER, in which ITERATION is the name of a role that the iteration
    trains.

    Raises ConfigError for an unknown role, and for a number that is not positive.
    """
    out = dict[tuple[str, str], float]()
    for text in settings:
        names, _, value = text.partition("=")
        iteration, _, role = names.partition(".")
        number = _number(value, f"--draws {text}")
        if iteration not in roles or role not in roles:
            known = ", ".join(roles)
            raise ConfigError(
                f"--draws {text}: it has the form ITERATION.ROLE=NUMBER; iterations and roles are {known}"
            )
        if not 0 < number < float("inf"):
            raise ConfigError(f"--draws {text}: a mean number of samples for each prompt, above 0")
        out[iteration, role] = number
    return out


def _middle(schedule: Sequence[Sequence[Sequence[str]]]) -> Sequence[Sequence[str]]:
    """Returns the cycle that contains the middle iteration of the run.

    A long warm-up may consist of many short cycles, so that the middle of the list of cycles may be in the warm-up.
    """
    ends = list(accumulate(len(cycle) for cycle in schedule))
    return schedule[bisect_right(ends, ends[-1] // 2)]


def _greatest(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Returns the largest sample count of each role in `counts`, which has one mapping from roles to counts per role
    that an iteration trains.

    The largest count suffices, because roles that are trained in the same iteration share one set of samples.
    """
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: max(one.get(name, 0) for one in counts) for name in names}


def _number(text: str, given: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{given}: {text!r} is not a number") from None


def episodes_of(spec: RunSpec, settings: Sequence[str]) -> dict[str, EpisodeEstimate]:
    """Returns {role: estimate of its episodes}: the recipe's estimates, overridden by `settings`.

    `settings`: texts of the form ROLE.name=value, in which `name` is a field of the estimate.

    Raises ConfigError for an unknown role or name, and for an invalid value.
    """
    own: dict[str, list[str]] = {name: [] for name in spec.roles}
    for text in settings:
        role, _, rest = text.partition(".")
        if role not in own:
            raise ConfigError(f"--episode {text}: it has the form ROLE.name=value; the roles are {', '.join(own)}")
        own[role].append(rest)
    parts = spec.recipe.roles()
    out = dict[str, EpisodeEstimate]()
    for name, given in own.items():
        said = asdict(parts[name].episode) if name in parts else {}
        try:
            out[name] = config_files.load(EpisodeEstimate, [], [*(f"{k}={v}" for k, v in said.items()), *given])
        except ConfigError as error:
            raise ConfigError(f"--episode of {name}: {error}") from error
    return out


def longest_context(role: RoleConfig, episode: EpisodeEstimate) -> int:
    """Returns the maximum number of tokens of one sample of a role.

    The number is the sum of the longest prompt, all answers at maximum length, and the mean number of tokens between
    answers. In a bounded episode, the number is the maximum prompt length plus one answer.
    """
    if episode.bounded:
        return role.max_prompt_tokens + role.sampling.max_tokens
    return role.max_prompt_tokens + episode.answers * role.sampling.max_tokens + (episode.answers - 1) * episode.told


def _draws(
    spec: RunSpec,
    drawn: Mapping[str, float],
    alike: Mapping[str, float],
    fills: Mapping[str, float],
    episodes: Mapping[str, EpisodeEstimate],
) -> list[Draw]:
    out = list[Draw]()
    for name, each in drawn.items():
        prompt, response, longest = _lengths(spec.roles[name], episodes[name], fills.get(name))
        out.append(
            Draw(
                role=name,
                samples=max(1, round(spec.run.prompts_per_iteration * each)),
                prompt=prompt,
                response=response,
                longest=longest,
                per_prompt=max(1.0, min(each, alike.get(name, 1))),
                episode=episodes[name],
            )
        )
    return out


def _lengths(role: RoleConfig, episode: EpisodeEstimate, fill: float | None) -> tuple[float, float, int]:
    """Returns (mean tokens of a prompt, mean tokens of an answer, maximum tokens of an answer).

    `fill`: mean length as a share of the maximum length. If None, the role's mean_tokens are used.

    In a bounded episode, the prompt, the earlier answers and the tokens between answers share the budget of the prompt.
    Answers are as long as in other episodes, but short enough to leave an equal part of the budget for the prompt. The
    maximum is the length of an answer in the longest sample, in which all answers are equally long.
    """
    own, share, longest = role.mean_tokens, FILL if fill is None else fill, role.sampling.max_tokens
    before, response = share * role.max_prompt_tokens, share * longest
    if fill is None:
        before = min(own.prompt or before, role.max_prompt_tokens)
        response = min(own.answer or response, longest)
    if not episode.bounded or episode.answers == 1:
        return before, response, longest
    later = episode.answers - 1
    response = min(response, max(1.0, before / episode.answers - episode.told))
    prompt = max(1.0, before - later * (response + episode.told))
    room = longest_context(role, episode) - prompt - later * episode.told
    return prompt, response, min(longest, max(1, int(room / episode.answers)))


def models_of(roles: Mapping[str, RoleConfig], given: Sequence[str]) -> dict[str, Shape]:
    """Returns the shape of every role's model.

    `given`: texts of the form ROLE=SOURCE, which take the shape of a role's model from SOURCE instead of from the
    role's model path.

    Raises ConfigError for an invalid format, and for a model whose shape cannot be resolved.
    """
    sources = {name: role.model.path for name, role in roles.items()}
    for word in given:
        name, _, source = word.partition("=")
        if name not in sources or not source:
            raise ConfigError(f"--shape {word}: it has the form ROLE=SOURCE, the roles are {', '.join(sources)}")
        sources[name] = source
    return {name: read_shape(source) for name, source in sources.items()}


def guess_notes(models: Mapping[str, Shape]) -> list[str]:
    """Returns one note for every role whose model sizes are guessed."""
    return [
        f"{name}: sizes are those of {shape.name}, by the words of its path; if it is another model: --shape {name}=..."
        for name, shape in models.items()
        if shape.guessed
    ]
