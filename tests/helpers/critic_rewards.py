"""The reward of a chain: a text of random words is worth 1 if it has two `a` or more."""


def two_a(response: str, payload: dict[str, object]) -> float:
    return float(response.split().count("a") >= 2)
